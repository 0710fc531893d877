"""The names of transformers, TRL and accelerate that the trainers rely on without a promise of those libraries.

They are overridden private methods, attributes that no documentation names, and functions that are replaced for a
while. Nothing here runs in a training: tests/compat/test_table.py compares the table with the installed releases and
with the trainers' source, so that a release which changes one of them breaks with a sentence.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Seam:
    """One such name.

    Attributes:
        module, name: where it is; `name` may be a class and its attribute. An attribute that is set on an object while
            the library runs, and is none of the class, counts where the class's or module's source has its name.
        why: what the trainers do with it.
        parameters: those of a function that is overridden or replaced, after self; None where they don't matter.
    """

    module: str
    name: str
    why: str
    parameters: tuple[str, ...] | None = None


_SFT = "trl.trainer.sft_trainer"
_TRAINER = "transformers.trainer"

SEAMS = (
    # rows
    Seam(_SFT, "SFTTrainer._prepare_dataset", "rows are counted and checked before they are cut and packed",
         ("dataset", "processing_class", "args", "packing", "formatting_func", "dataset_name")),
    Seam(_SFT, "SFTTrainer._skip_prepare_dataset", "teachers have to see rows that nobody prepares"),
    Seam(_SFT, "SFTTrainer._tokenizer", "the tokenizer inside a processor"),
    Seam(_TRAINER, "Trainer._signature_columns", "checkpoints record the rows that are trained on"),
    Seam(_TRAINER, "Trainer._set_signature_columns_if_needed", "checkpoints record the rows that are trained on", ()),
    Seam(_SFT, "DataCollatorForVisionLanguageModeling", "its batches are cut to length where no image is lost"),
    Seam("trl.chat_template_utils", "get_training_chat_template", "marks answers for a teacher's own processor"),
    Seam("trl.data_utils", "is_conversational", "rows of prompts alone are texts or messages", ("example",)),
    Seam("trl.data_utils", "get_dataset_column_names", "columns of streams too", ("dataset",)),
    # the student
    Seam(_SFT, "create_model_from_path", "a model that lacks weights in its files is refused: replaced meanwhile"),
    Seam(_SFT, "BaseTunerLayer", "adapters on lm_head are allowed: replaced meanwhile"),
    Seam("trl.trainer.utils", "create_model_from_path", "loads students and teachers"),
    Seam("trl.trainer.utils", "disable_dropout_in_model", "switches the student's dropout off", ("model",)),
    Seam("transformers.configuration_utils", "PreTrainedConfig._name_or_path",
         "a model that was loaded has its weights before training compared on resume"),
    Seam("accelerate.accelerator", "_is_accelerate_prepared",
         "a model that was evaluated before training is prepared anew"),
    Seam("accelerate.accelerator", "_original_forward", "the forward below autocast, put back for the same reason"),
    Seam("transformers.quantizers.quantizers_utils", "should_convert_module",
         "the layers that are trained quantised are those that are loaded so", ("full_name", "patterns")),
    Seam("transformers.modeling_utils", "PreTrainedModel._keep_in_fp32_modules", "the same"),
    # metrics and checkpoints
    Seam(_SFT, "SFTTrainer._tag_names", "tags of the model card"),
    Seam(_SFT, "SFTTrainer._name", "the method that the model card names"),
    Seam(_SFT, "SFTTrainer._metrics", "logs stand beside TRL's own; what was not logged is dropped"),
    Seam(_SFT, "SFTTrainer._total_train_tokens", "num_tokens goes on through checkpoints"),
    Seam(_SFT, "SFTTrainer._tp_size", "ranks of tensor parallelism read the same tokens"),
    Seam(_SFT, "SFTTrainer.aux_loss_enabled", "whether a mixture of experts adds its auxiliary loss"),
    Seam(_SFT, "SFTTrainer.router_aux_loss_coef", "the weight of that loss"),
    Seam(_SFT, "SFTTrainer._save_checkpoint", "token count and fingerprints go into the state; staged",
         ("model", "trial")),
    Seam(_TRAINER, "Trainer._get_grad_norm", "the norm of each step's gradients is watched", ("model", "grad_norm")),
    Seam(_TRAINER, "Trainer._clip_grad_norm", "gradients are clipped in the optimizer's step", ("model",)),
    Seam("torch.optim", "AdamW._init_group", "the optimizer's state is made and named as torch's",
         ("group", "params_with_grad", "grads", "exp_avgs", "exp_avg_sqs", "max_exp_avg_sqs", "state_steps")),
    Seam("torch.optim", "AdamW._optimizer_step_pre_hooks", "a hook before the step gets clipped gradients"),
    Seam("torch.optim", "AdamW._optimizer_step_post_hooks", "and so does one behind it"),
    Seam("torch.optim.optimizer", "_global_optimizer_pre_hooks", "a hook of all optimizers gets clipped gradients"),
    Seam("torch.optim.optimizer", "_global_optimizer_post_hooks", "and so does one behind their steps"),
    Seam("torch", "_foreach_add_", "counts the steps of all parameters"),
    Seam("torch", "_foreach_sub_", "a step that is left out is not counted"),
    Seam("torch", "_foreach_mul_", "clips before a step of torch's own"),
    Seam(_TRAINER, "Trainer._tr_loss", "the sum of losses stays NaN once it was, as NaN - NaN is: it is set to 0"),
    Seam(_TRAINER, "Trainer._total_loss_scalar", "and `train_loss`, its mean, leaves such logs out"),
    Seam(_TRAINER, "Trainer._globalstep_last_logged", "so does what was not logged at the end"),
    Seam(_TRAINER, "Trainer._finalize_training", "which is added there", ("trial", "num_train_samples", "start_time")),
    Seam("torch.optim", "AdamW._step_supports_amp_scaling", "fused optimizers drop a step on the device"),
    Seam(_TRAINER, "Trainer._save", "arguments are saved without secrets", ("output_dir", "state_dict")),
    Seam(_TRAINER, "Trainer._get_output_dir", "checkpoints are written beside, then renamed", ("trial",)),
    Seam(_TRAINER, "Trainer._push_from_checkpoint", "a checkpoint is pushed when it has its name, and without secrets",
         ("checkpoint_folder",)),
    Seam(_TRAINER, "Trainer._init_training_state", "a training that has made all its steps makes no other one",
         ("max_steps", "num_update_steps_per_epoch", "num_train_epochs", "resume_from_checkpoint", "trial")),
    Seam(_TRAINER, "Trainer._save_optimizer_and_scheduler", "projectors and TAID's state are saved", ("output_dir",)),
    Seam(_TRAINER, "Trainer._load_optimizer_and_scheduler", "projectors and TAID's state are loaded", ("checkpoint",)),
    Seam(_TRAINER, "Trainer._load_best_model", "the projectors of the best checkpoint are loaded", ()),
    Seam(_TRAINER, "Trainer._load_from_checkpoint", "weights that files have under other names are read back",
         ("resume_from_checkpoint", "model")),
    Seam(_TRAINER, "Trainer._issue_warnings_after_load", "tells which weights Trainer could not read back",
         ("load_result",)),
    Seam(_TRAINER, "Trainer.get_batch_samples", "completions are sampled before the tokens of a step are counted",
         ("epoch_iterator", "num_batches", "device")),
    Seam("trl.trainer.sft_config", "SFTConfig._VALID_DICT_FIELDS", "fields that may be JSON on a command line"),
    # rows of which several processes have slices
    Seam(_TRAINER, "Trainer._get_num_items_in_batch", "the tokens of a step are those of all slices",
         ("batch_samples", "device")),
    Seam(_TRAINER, "Trainer.model_accepts_loss_kwargs", "the loss is divided by these tokens, not by micro-batches"),
    # the order of training rows
    Seam(_TRAINER, "Trainer._get_train_sampler", "rows grouped by length get an order that seed and epoch decide",
         ("train_dataset",)),
    Seam(_TRAINER, "Trainer._run_epoch", "the sampler of batch_rebalance is told the epoch, on several processes too",
         ("model", "epoch", "train_dataloader", "steps_in_epoch", "num_update_steps_per_epoch", "trial",
          "ignore_keys_for_eval", "start_time", "resume_from_checkpoint", "epochs_trained",
          "steps_trained_in_current_epoch")),
    # evaluation on several processes
    Seam(_TRAINER, "Trainer._get_dataloader", "the last batch is filled with rows that are known to be repeated",
         ("dataset", "description", "batch_size", "sampler_fn", "is_training", "dataloader_key")),
    Seam(_TRAINER, "Trainer._remove_unused_columns", "the same, before rows are wrapped", ("dataset", "description")),
    Seam("accelerate.data_loader", "DataLoaderAdapter.base_dataloader", "its collator leaves repeated rows out"),
    Seam("accelerate.data_loader", "DataLoaderShard._drop_last", "nothing is repeated where the rest is dropped"),
    Seam("accelerate.data_loader", "DataLoaderShard.total_batch_size", "rows of all processes in a step"),
    Seam("accelerate.data_loader", "DataLoaderStateMixin.total_dataset_length", "asked of our dataset of filled rows"),
    Seam("accelerate.data_loader", "BatchSamplerShard", "tells accelerate's way of filling the last batch"),
    Seam("accelerate.data_loader", "IterableDatasetShard", "tells accelerate's way of filling the last batch"),
    Seam("accelerate.state", "GradientState.end_of_dataloader", "only the last batch has repeated rows"),
    Seam("accelerate.state", "GradientState.remainder", "how many rows of the last batch are not repeated"),
    Seam("accelerate.state", "GradientState.active_dataloader", "the loader of the batch at hand"),
    # sampling
    Seam("trl.trainer.utils", "pad", "pads prompts on the left"),
    Seam("trl.generation.vllm_generation", "is_vllm_available", "vLLM that is not installed is refused"),
    Seam("trl.generation.vllm_generation", "VLLMGeneration.sync_weights", "vLLM samples with the step's weights", ()),
    Seam("trl.generation.vllm_generation", "VLLMGeneration.generate", "vLLM samples for the student"),
)  # fmt: skip
