"""The names of other libraries that we rely on without a promise of theirs, and what for.

They are private names, attributes that no documentation names, methods that are overridden, and functions that are
replaced for a while. tests/compat/test_table.py compares the table with the installed releases and with our source, so
that a release which changes one of them breaks with a sentence.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Name:
    """One such name.

    Attributes:
        module, name: where it is; `name` may be a class and its attribute. An attribute that is set on an object while
            the library runs, and is none of the class, counts where the class's or module's source has its name.
        why: what we do with it.
        parameters: those of a function that is called, overridden or replaced, after self; None where they don't
            matter.
        since: the first release that has it; what it serves is not in earlier ones, or has another name there.
    """

    module: str
    name: str
    why: str
    parameters: tuple[str, ...] | None = None
    since: str = "0"


_SFT = "trl.trainer.sft_trainer"
_TRAINER = "transformers.trainer"
_MODEL = "transformers.modeling_utils"
_MODULE = "torch.nn.modules.module"
_FSDP = "torch.distributed.fsdp._fully_shard._fsdp_state"
_FSDP_GROUP = "torch.distributed.fsdp._fully_shard._fsdp_param_group"
_FSDP_PARAM = "torch.distributed.fsdp._fully_shard._fsdp_param"

NAMES = (
    # trainers: rows
    Name(_SFT, "SFTTrainer._prepare_dataset", "rows are counted and checked before they are cut and packed",
         ("dataset", "processing_class", "args", "packing", "formatting_func", "dataset_name")),
    Name(_SFT, "SFTTrainer._skip_prepare_dataset", "teachers have to see rows that nobody prepares"),
    Name(_SFT, "SFTTrainer._tokenizer", "the tokenizer inside a processor"),
    Name(_TRAINER, "Trainer._signature_columns", "checkpoints record the rows that are trained on"),
    Name(_TRAINER, "Trainer._set_signature_columns_if_needed", "checkpoints record the rows that are trained on", ()),
    Name(_SFT, "DataCollatorForVisionLanguageModeling", "its batches are cut to length where no image is lost"),
    Name("trl.chat_template_utils", "get_training_chat_template", "marks answers for a teacher's own processor"),
    Name("trl.data_utils", "is_conversational", "rows of only prompts are texts or messages", ("example",)),
    # the student
    Name(_SFT, "create_model_from_path", "a model that lacks weights in its files is refused: replaced meanwhile"),
    Name(_SFT, "BaseTunerLayer", "adapters on lm_head are allowed: replaced meanwhile"),
    Name("trl.trainer.utils", "create_model_from_path", "loads students and teachers"),
    Name("trl.trainer.utils", "disable_dropout_in_model", "switches the student's dropout off", ("model",)),
    Name("transformers.configuration_utils", "PreTrainedConfig._name_or_path",
         "a model that was loaded has its weights before training compared on resume"),
    Name("accelerate.accelerator", "_is_accelerate_prepared",
         "a model that was evaluated before training is prepared again"),
    Name("accelerate.accelerator", "_original_forward", "the forward below autocast, put back for the same reason"),
    Name("transformers.quantizers.quantizers_utils", "should_convert_module",
         "the layers that are trained quantised are those that are loaded so", ("full_name", "patterns")),
    Name("transformers.modeling_utils", "PreTrainedModel._keep_in_fp32_modules", "the same"),
    Name("transformers.quantizers.quantizer_bnb_4bit", "Bnb4BitHfQuantizer.param_needs_quantization",
         "experts are quantised to 4 bits too: replaced meanwhile", ("model", "param_name", "kwargs")),
    Name("transformers.integrations.bitsandbytes", "Bnb4bitQuantize", "the same"),
    Name("transformers.quantizers.quantizer_mxfp4", "Mxfp4HfQuantizer.param_element_size",
         "memory is reserved for MXFP4's experts as they are: replaced meanwhile", ("model", "param_name", "param")),
    Name("transformers.integrations.mxfp4", "Mxfp4Dequantize", "MXFP4's experts stay packed: replaced meanwhile"),
    # metrics and checkpoints
    Name(_SFT, "SFTTrainer._tag_names", "tags of the model card"),
    Name(_SFT, "SFTTrainer._name", "the method that the model card names"),
    Name(_SFT, "SFTTrainer._metrics", "joined with our logs; what was not logged is dropped"),
    Name(_SFT, "SFTTrainer._total_train_tokens", "num_tokens goes on through checkpoints"),
    Name(_SFT, "SFTTrainer._tp_size", "ranks of tensor parallelism read the same tokens"),
    Name(_SFT, "SFTTrainer.aux_loss_enabled", "whether a mixture of experts adds its auxiliary loss"),
    Name(_SFT, "SFTTrainer.router_aux_loss_coef", "the weight of that loss"),
    Name(_SFT, "SFTTrainer._save_checkpoint", "token count and fingerprints go into the state; staged",
         ("model", "trial")),
    Name(_TRAINER, "Trainer._get_grad_norm", "the norm of each step's gradients is watched", ("model", "grad_norm")),
    Name(_TRAINER, "Trainer._clip_grad_norm", "gradients are clipped in the optimizer's step", ("model",)),
    Name("torch.optim", "AdamW._init_group", "the optimizer's state is made and named as torch's",
         ("group", "params_with_grad", "grads", "exp_avgs", "exp_avg_sqs", "max_exp_avg_sqs", "state_steps")),
    Name("torch.optim", "AdamW._optimizer_step_pre_hooks", "a hook before the step gets clipped gradients"),
    Name("torch.optim", "AdamW._optimizer_step_post_hooks", "and so does one behind it"),
    Name("torch.optim.optimizer", "_global_optimizer_pre_hooks", "a hook of all optimizers gets clipped gradients"),
    Name("torch.optim.optimizer", "_global_optimizer_post_hooks", "and so does one behind their steps"),
    Name("torch", "_foreach_add_", "counts the steps of all parameters"),
    Name("torch", "_foreach_sub_", "a step that is left out is not counted"),
    Name("torch", "_foreach_mul_", "clips before a step of torch's own"),
    Name(_TRAINER, "Trainer._tr_loss", "the sum of losses stays NaN once it was, as NaN - NaN is: it is set to 0"),
    Name(_TRAINER, "Trainer._total_loss_scalar", "and `train_loss`, its mean, leaves such logs out"),
    Name(_TRAINER, "Trainer._globalstep_last_logged", "so does what was not logged at the end"),
    Name(_TRAINER, "Trainer._finalize_training", "which is added there", ("trial", "num_train_samples", "start_time")),
    Name("torch.optim", "AdamW._step_supports_amp_scaling", "fused optimizers drop a step on the device"),
    Name(_TRAINER, "Trainer._save", "arguments are saved without secrets", ("output_dir", "state_dict")),
    Name(_TRAINER, "Trainer._get_output_dir", "checkpoints are written under another name, then renamed", ("trial",)),
    Name(_TRAINER, "Trainer._push_from_checkpoint", "a checkpoint is pushed when it has its name, and without secrets",
         ("checkpoint_folder",)),
    Name(_TRAINER, "Trainer._init_training_state", "a training that has made all its steps makes no other one",
         ("max_steps", "num_update_steps_per_epoch", "num_train_epochs", "resume_from_checkpoint", "trial")),
    Name(_TRAINER, "Trainer._save_optimizer_and_scheduler", "projectors and TAID's state are saved", ("output_dir",)),
    Name(_TRAINER, "Trainer._load_optimizer_and_scheduler", "projectors and TAID's state are loaded", ("checkpoint",)),
    Name(_TRAINER, "Trainer._load_best_model", "the projectors of the best checkpoint are loaded", ()),
    Name(_TRAINER, "Trainer._load_from_checkpoint", "weights that files have under other names are read back",
         ("resume_from_checkpoint", "model")),
    Name(_TRAINER, "Trainer._issue_warnings_after_load", "tells which weights Trainer could not read back",
         ("load_result",)),
    Name(_TRAINER, "Trainer.get_batch_samples", "completions are sampled before the tokens of a step are counted",
         ("epoch_iterator", "num_batches", "device")),
    Name("trl.trainer.sft_config", "SFTConfig._VALID_DICT_FIELDS", "fields that may be JSON on a command line"),
    # rows of which several processes have slices
    Name(_TRAINER, "Trainer._get_num_items_in_batch", "the tokens of a step are those of all slices",
         ("batch_samples", "device")),
    Name(_TRAINER, "Trainer.model_accepts_loss_kwargs", "the loss is divided by these tokens, not by micro-batches"),
    # the order of training rows
    Name(_TRAINER, "Trainer._get_train_sampler", "rows grouped by length get an order that seed and epoch decide",
         ("train_dataset",)),
    Name(_TRAINER, "Trainer._run_epoch", "the sampler of batch_rebalance is told the epoch, on several processes too",
         ("model", "epoch", "train_dataloader", "steps_in_epoch", "num_update_steps_per_epoch", "trial",
          "ignore_keys_for_eval", "start_time", "resume_from_checkpoint", "epochs_trained",
          "steps_trained_in_current_epoch")),
    # evaluation on several processes
    Name(_TRAINER, "Trainer._get_dataloader", "the last batch is filled with rows that are known to be repeated",
         ("dataset", "description", "batch_size", "sampler_fn", "is_training", "dataloader_key")),
    Name(_TRAINER, "Trainer._remove_unused_columns", "the same, before rows are wrapped", ("dataset", "description")),
    Name("accelerate.data_loader", "DataLoaderAdapter.base_dataloader", "its collator leaves repeated rows out"),
    Name("accelerate.data_loader", "DataLoaderShard._drop_last", "nothing is repeated where the rest is dropped"),
    Name("accelerate.data_loader", "DataLoaderShard.total_batch_size", "rows of all processes in a step"),
    Name("accelerate.data_loader", "DataLoaderStateMixin.total_dataset_length", "asked of our dataset of filled rows"),
    Name("accelerate.data_loader", "BatchSamplerShard", "tells accelerate's way of filling the last batch"),
    Name("accelerate.data_loader", "IterableDatasetShard", "tells accelerate's way of filling the last batch"),
    Name("accelerate.state", "GradientState.end_of_dataloader", "only the last batch has repeated rows"),
    Name("accelerate.state", "GradientState.remainder", "how many rows of the last batch are not repeated"),
    Name("accelerate.state", "GradientState.active_dataloader", "the loader of the batch at hand"),
    # sampling
    Name("trl.trainer.utils", "pad", "pads prompts on the left"),
    Name("trl.generation.vllm_generation", "is_vllm_available", "vLLM that is not installed is refused"),
    Name("trl.generation.vllm_generation", "VLLMGeneration.sync_weights", "vLLM samples with the step's weights", ()),
    Name("trl.generation.vllm_generation", "VLLMGeneration.generate", "vLLM samples for the student"),
    # torch: modules
    Name(_MODULE, "Module._parameters", "the dictionary of a module's parameters"),
    Name(_MODULE, "Module._buffers", "the dictionary of a module's buffers"),
    Name(_MODULE, "Module._modules", "the dictionary of a module's children"),
    Name(_MODULE, "Module._forward_hooks", "an op must not replace the call of a hooked module"),
    Name(_MODULE, "Module._forward_pre_hooks", "the same"),
    Name(_MODULE, "Module._backward_hooks", "the same"),
    Name(_MODULE, "Module._backward_pre_hooks", "the same"),
    Name(_MODULE, "_has_any_global_hook", "the same, for hooks on all modules", ()),
    Name(_MODULE, "_global_backward_hooks", "the same, for those that want gradients"),
    Name(_MODULE, "_global_backward_pre_hooks", "the same, for those that want gradients"),
    Name(_MODULE, "Module._replicate_for_data_parallel", "a patched model refuses nn.DataParallel", ()),
    Name("torch._dynamo.eval_frame", "OptimizedModule._orig_mod", "a compiled model is told from a plain one"),
    Name("torch.utils.hooks", "RemovableHandle.next_id", "tells whether hooks were registered since"),
    # torch: tensors, operators, autograd
    Name("torch", "Tensor._version", "tells whether a tensor was written into"),
    Name("torch", "Tensor._make_wrapper_subclass", "logits that have no memory until they are read"),
    Name("torch._C", "_is_alias_of", "whether a result holds memory of deferred logits"),
    Name("torch._C", "DisableTorchFunctionSubclass", "describes such logits without reading them"),
    Name("torch._C._nn", "_parse_to", "reads the arguments of `to` of deferred logits"),
    Name("torch._C", "_current_graph_task_id", "tells a checkpoint's second forward from the first"),
    Name("torch._C", "_are_functorch_transforms_active", "torch.func's transforms are refused in a sentence"),
    Name("torch._C._autograd", "_top_saved_tensors_default_hooks", "tells whether a checkpoint has begun"),
    Name("torch._C._autograd", "_get_current_graph_task_keep_graph", "whether memory may be used again"),
    Name("torch.utils.checkpoint", "_checkpoint_hook", "the name by which that hook is known"),
    Name("torch.ops.aten", "_flash_attention_forward", "attention over packed rows by lengths"),
    Name("torch.ops.aten", "_to_copy", "estimates count copies that autocast makes"),
    Name("torch", "_grouped_mm", "estimates have a stand-in for the products of experts"),
    Name("torch._subclasses.fake_tensor", "FakeTensor", "tensors without data, of estimates and torch.compile"),
    Name("torch._subclasses.fake_tensor", "FakeTensorMode", "estimates run a step on such tensors"),
    Name("torch._subclasses.fake_tensor", "DataDependentOutputException", "what they cannot run says so"),
    Name("torch._subclasses.fake_tensor", "DynamicOutputShapeException", "the same"),
    Name("torch.utils._python_dispatch", "TorchDispatchMode", "estimates count the memory of each operator"),
    Name("torch.utils._pytree", "tree_leaves", "finds the tensors in what a function returns"),
    Name("torch.utils._pytree", "tree_map", "exchanges them"),
    Name("torch", "_foreach_copy_", "stacks the matrices of all adapters of a layer in one launch"),
    # torch: FSDP2
    Name("torch.distributed.fsdp", "FSDPModule._get_fsdp_state", "the state of a unit whose head stays sharded"),
    Name(_FSDP, "FSDPState._mp_policy", "the dtypes that the unit would gather in"),
    Name(_FSDP, "FSDPState._pre_forward_hook_handle", "the hook that gathers, passed over for such a head"),
    Name(_FSDP, "FSDPState._post_forward_hook_handle", "the hook that frees, passed over too"),
    Name(_FSDP, "FSDPState._fsdp_param_groups", "the weights that a unit gathers", since="2.13"),
    Name(_FSDP, "FSDPState._fsdp_param_group", "the same where there is no more than one group"),
    Name(_FSDP, "FSDPState._auto_reshard_after_forward", "set back after whole weights were kept"),
    Name(_FSDP_GROUP, "FSDPParamGroup.fsdp_params", "only those that have changed are gathered: replaced meanwhile"),
    Name(_FSDP_GROUP, "FSDPParamGroup.unshard", "the same", ("async_op",)),
    Name(_FSDP_GROUP, "FSDPParamGroup.wait_for_unshard", "the same", ()),
    Name(_FSDP_GROUP, "FSDPParamGroup._all_gather_result", "whether a group is being gathered"),
    Name(_FSDP_GROUP, "FSDPParamGroup.is_unsharded", "whether it is whole"),
    Name(_FSDP_GROUP, "FSDPParamGroup._to_unsharded", "sets whole weights that need no gathering", ()),
    Name(_FSDP_GROUP, "FSDPParamGroup.post_forward_mesh_info", "set back after whole weights were kept"),
    Name(_FSDP_PARAM, "FSDPParam._unsharded_param", "whether a weight was gathered once"),
    Name(_FSDP_PARAM, "FSDPParam.unsharded_param", "the whole of a weight"),
    Name(_FSDP_PARAM, "FSDPParam.sharded_param", "its shard, which is trained or not"),
    Name(_FSDP_PARAM, "FSDPParam.sharded_state", "which of both its modules have"),
    Name(_FSDP_PARAM, "FSDPParam.mp_policy", "the dtype that it is gathered in"),
    Name(_FSDP_PARAM, "FSDPParam.to_unsharded", "sets the whole on its modules", ()),
    Name(_FSDP_PARAM, "FSDPParam._setattr_on_modules", "sets either while layers are recorded", ("param",)),
    Name(_FSDP_PARAM, "FSDPParam.free_unsharded_param", "does nothing while whole weights are kept: replaced", ()),
    Name("torch.distributed.tensor", "DTensor._local_tensor", "tells whether a shard was written into"),
    # models
    Name("transformers.configuration_utils", "PreTrainedConfig._attn_implementation",
         "which attention a model runs"),
    Name("transformers.configuration_utils", "PreTrainedConfig._attn_implementation_internal",
         "ours is put in its place for as long as a model is patched"),
    Name("transformers.configuration_utils", "PreTrainedConfig._experts_implementation",
         "which products experts run"),
    Name(_MODEL, "PreTrainedModel._loss_function", "the fused loss takes its place in a forward"),
    Name(_MODEL, "PreTrainedModel._from_config", "models of fewer layers, and on the meta device"),
    Name(_MODEL, "PreTrainedModel._no_split_modules", "the layers that are FSDP2 units of a teacher"),
    Name("transformers.integrations.moe", "_apply_gate", "the gate of experts is replaced by ours"),
    Name("transformers.integrations.moe", "_is_expert_parallel", "experts on several devices are not replaced",
         since="5.16"),
    Name("transformers.generation.configuration_utils", "GenerationConfig._original_object_hash",
         "special tokens that a trainer sets do not forbid saving"),
    Name("transformers.masking_utils", "find_packed_sequence_indices",
         "not asked where batches bring the lengths of documents: replaced meanwhile", ("position_ids",)),
    Name("accelerate.hooks", "_hf_hook", "a forward with accelerate's hook is replaced below the hook"),
    Name("accelerate.hooks", "_old_forward", "where that forward is"),
    Name("peft.tuners.tuners_utils", "BaseTunerLayer._disable_adapters", "a teacher is the model without them"),
    Name("peft.tuners.tuners_utils", "BaseTunerLayer._active_adapter", "CUDA graphs are recorded for one"),
    Name("peft.utils.other", "AuxiliaryTrainingWrapper._adapters", "reads an output head that is saved whole"),
    Name("peft.tuners.trainable_tokens", "TrainableTokensLayer._check_overlapping_tokens",
         "reads an output head with trained tokens", ("adapter_names",)),
    Name("peft.tuners.lora.layer", "ParamWrapper._did_swap_in_out_features",
         "which side of stacked experts A is on"),
    # the stock flag, and TRL's other trainers
    Name(_TRAINER, "apply_liger_kernel", "serves `use_liger_kernel`: replaced", ("model", "kernel_config")),
    Name(_TRAINER, "Trainer.evaluation_loop", "serves the flag in evaluations: replaced"),
    Name("trl.trainer.utils", "_ChunkedLogProbFunction", "TRL's fused head calls ours: replaced"),
    Name("trl.trainer.utils", "add_fused_lm_head", "its wrapper around a model's forward is passed over"),
    Name("transformers.training_args", "TrainingArguments._n_gpu", "the student keeps off the teacher's GPU"),
    # Python
    Name("sys", "_getframe", "a deep copy of a PEFT model asks the model inside of it"),
    # output heads that stay sharded
    Name("accelerate.utils.fsdp_utils", "fsdp2_prepare_auto_wrap_policy",
         "gives the head a unit: replaced meanwhile", ("fsdp2_plugin", "model")),
    # DeepSpeed, where it is installed
    Name("deepspeed.runtime.zero.partition_parameters", "_external_params",
         "an output head is gathered for the model's whole pass"),
    Name("deepspeed.utils.z3_leaf_module", "_z3_leaf", "decoder layers are gathered as one"),
    Name("deepspeed.runtime.zero.stage3", "DeepSpeedZeroOptimizer_Stage3._global_grad_norm",
         "the norm of each step's gradients is watched"),
    Name("deepspeed.runtime.zero.stage3",
         "DeepSpeedZeroOptimizer_Stage3._DeepSpeedZeroOptimizer_Stage3__avg_scatter_grads",
         "gradients of rows' slices are averaged over all ranks"),
    Name("deepspeed.utils.groups", "_get_sequence_parallel_group", "the ranks that share a teacher's rows", ()),
)  # fmt: skip
