"""Tests of what an old release of another library does not have, or does otherwise: they wait for a newer one.

Our floors are lower than what each test needs: what a line names is not there with older releases, or is as these make
it. Nothing of ours is skipped for its own sake.
"""

from importlib.metadata import version
from pathlib import Path

import pytest
from packaging.version import Version

# what a test's id begins with below tests/, or contains: the release it needs, and why
NEEDS = {
    # families and functions that came later
    "patching/test_attention.py::test_loss_and_gradients[deepseek_v4": ("transformers", "5.7", "no such family"),
    "patching/test_attention.py::test_loss_and_gradients[qwen3_next": ("transformers", "5.16", "its cache fails"),
    "trainers/test_training_rows.py::test_the_sampler_of_several": ("transformers", "5.16", "no such sampler"),
    "patching/test_packed_attention.py::test_loss_and_gradients_are_those_of_documents_one_by_one[gemma4": (
        "transformers", "5.17", "other layers of Gemma 4"),
    "patching/test_packed_attention.py::test_gemma4_gets": ("transformers", "5.23", "no such method"),
    "trainers/test_distill_trainer.py::test_a_teacher_by_its_directory": (
        "transformers", "5.22", "a model that is read differs in its last digits"),
    "patching/test_packed_attention.py::test_masks_that_say_more": ("transformers", "5.16", "no blocks in masks"),
    "compat/test_recognitions.py::test_the_installed_release_is_recognised[TENSOR_PARALLEL]": (
        "transformers", "5.16", "it shards by hooks, which are left alone"),
    "compat/test_recognitions.py::test_a_release_that_is_not_recognised_is_told_once[TENSOR_PARALLEL]": (
        "transformers", "5.16", "it shards by hooks, which are left alone"),
    "compat/test_recognitions.py::test_doctor_tells": ("transformers", "5.16", "it shards by hooks"),
    # what transformers computed otherwise, for itself too
    "losses/test_labels.py": ("transformers", "5.16", "these families computed other losses of their own"),
    "losses/test_fused_forward.py::test_without_labels_nothing_changes[mixtral]": (
        "transformers", "5.16", "its own forward fails without labels"),
    "trainers/test_sft_trainer.py::test_a_generation_config_as_published": (
        "transformers", "5.17", "it refuses to save such a one, which our trainers say before training"),
    "trainers/test_packed_rows.py::test_a_collator_of_one_s_own": (
        "transformers", "5.17", "it counted labels that nobody predicts"),
    "trainers/test_sft_trainer.py::test_what_a_loss_is_divided_by": (
        "transformers", "5.17", "it counted labels that nobody predicts"),
    "trainers/test_chat_rows.py::test_what_a_template_makes_of_a_chat": (
        "transformers", "5.17", "templates see fields that are null"),
    "patching/test_use_liger_kernel.py::test_a_stock_trainer_trains_the_patched_model_as_the_plain_one[evaluated]": (
        "transformers", "5.17", "an evaluation applied the flag by itself"),
    "trainers/test_messages.py::test_a_marked_message_is_not_learned[all": (
        "transformers", "5.17", "marks that end in a space which no token holds went on to the row's end"),
    "teachers/test_server.py::test_nothing_behind": (
        "transformers", "5.17", "marks that end in a space which no token holds went on to the row's end"),
    # images
    "trainers/test_images.py": ("transformers", "5.17", "Gemma 3 computed its loss of stored logits"),
    "patching/test_vision.py": ("transformers", "5.17", "features were looked up among the embeddings"),
    "compat/test_recognitions.py::test_the_installed_release_is_recognised[PLACEHOLDERS]": (
        "transformers", "5.17", "features were looked up among the embeddings"),
    "compat/test_recognitions.py::test_no_structure_gives_a_false_alarm": (
        "transformers", "5.17", "features were looked up among the embeddings"),
    # PEFT
    "patching/test_stacked_experts.py::test_states": ("peft", "0.19", "one adapter a model on stacked experts"),
    "teachers/test_adapters_off.py::test_a_start_that_leaves_the_base_alone_begins_at_a_divergence_of_0[mica": (
        "peft", "0.20", "no such start"),
    "compat/test_table.py::test_a_name_is_there_as_we_need_it[peft ParamWrapper": ("peft", "0.21", "no such choice"),
    # TRL
    "losses/test_against_trl.py::test_loss_of_distillation_trainer": ("trl", "1.16", "its loss needs a GPU"),
    "trainers/test_against_trl.py": ("trl", "1.16", "its loss needs a GPU"),
    "patching/test_trl_losses.py": ("trl", "1.16", "its loss needs a GPU"),
    "trainers/test_step_graphs.py::test_floating_point_operations": ("trl", "1.16", "its loss needs a GPU"),
    "trainers/test_sft_trainer.py::test_compute_loss_func": ("trl", "1.16", "its loss needs a GPU"),
    "trainers/test_sft_trainer.py::test_tokens_are_counted": ("trl", "1.16", "its loss needs a GPU"),
    "trainers/test_sft_trainer.py::test_a_loss_that_an_sfttrainer_took_off": ("trl", "1.16", "its loss needs a GPU"),
    "trainers/test_distill_callback.py::test_the_end_of_training_gives_both_models_back[sft": (
        "trl", "1.16", "its loss needs a GPU"),
    "trainers/test_checkpointing.py::test_checkpoints_of_another_trainer": ("trl", "1.16", "its loss needs a GPU"),
    "trainers/test_data_forms.py::test_fine_tuning_is_that_of_sfttrainer": ("trl", "1.16", "its loss needs a GPU"),
    # torch
    "test_stacked_experts.py": ("torch", "2.11", "no grouped products on a CPU"),
    "test_router_loss.py": ("torch", "2.11", "no grouped products on a CPU"),
    "teachers/test_placement.py::test_it_equals_the_teacher_beside_the_student[mixtral": (
        "torch", "2.11", "no grouped products on a CPU"),
    "teachers/test_placement.py::test_a_streamed_teacher_generates[mixtral": (
        "torch", "2.11", "no grouped products on a CPU"),
    "patching/test_patcher.py::test_loss_and_gradients_are_the_plain_models": (
        "torch", "2.11", "no grouped products on a CPU"),
    "patching/test_tower_attention.py": ("torch", "2.11", "no grouped products on a CPU"),
    "trainers/test_checkpointing.py::test_two_processes": (
        "transformers", "5.20", "what was on the device cpu:0 is not read back"),
    "patching/test_compile.py": ("torch", "2.11", "torch.compile fails on what is patched"),
    "patching/test_attention.py::test_compiled_with_graph_breaks": (
        "torch", "2.11", "torch.compile fails on what is patched"),
    "losses/test_deferred_logits.py::test_other_operations_compute_the_logits_and_say_which[a mask of rows": (
        "torch", "2.11", "it refuses the mask"),
}  # fmt: skip
# modules that import families which came later
LATER = {"test_mlps.py": ("transformers", "5.17"), "test_norms.py": ("transformers", "5.17")}


def imports_later_families(path: Path) -> bool:
    """Whether a file of tests cannot be imported with the installed releases."""
    library, least = LATER.get(path.name, ("torch", "0"))
    return Version(version(library)) < Version(least)


def wait_for_newer(items: list[pytest.Item]) -> None:
    """Skip the tests that need a newer release than the installed one."""
    for start, (library, least, why) in NEEDS.items():
        installed = version(library)
        if Version(installed) >= Version(least):
            continue
        mark = pytest.mark.skip(reason=f"{library} {installed}, before {least}: {why}")
        for item in items:
            if start in item.nodeid:
                item.add_marker(mark)
