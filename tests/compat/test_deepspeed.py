"""What is read of DeepSpeed's own objects. What it does in training is tested in tests/distributed."""

from __future__ import annotations

import inspect
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lightrl.compat import deepspeed as compat

pytest.importorskip("deepspeed")


def source_of(name: str) -> str:
    from importlib import import_module

    return inspect.getsource(import_module(f"deepspeed.runtime.zero.{name}"))


def test_saving_a_model_does_not_import_deepspeed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    for name in [name for name in sys.modules if name.partition(".")[0] == "deepspeed"]:
        monkeypatch.delitem(sys.modules, name)
    sizes = {name: 8 for name in ("vocab_size", "hidden_size", "intermediate_size")}
    model = LlamaForCausalLM(LlamaConfig(**sizes, num_hidden_layers=1, num_attention_heads=2))
    compat.skip_unused()
    model.save_pretrained(tmp_path)
    assert "deepspeed" not in sys.modules
    monkeypatch.setitem(sys.modules, "deepspeed", SimpleNamespace())
    assert sys.modules["accelerate.utils.other"].is_deepspeed_available()


def test_each_backward_begins_as_after_a_forward_of_deepspeeds_own() -> None:
    from deepspeed.runtime.engine import DeepSpeedEngine

    done: list[Any] = []
    optimizer = SimpleNamespace(clear_backward_seen_flag=lambda: done.append("cleared"))
    compat.begin_backward(
        SimpleNamespace(optimizer=optimizer, set_gradient_accumulation_boundary=done.append), last=True
    )
    assert done == ["cleared", True]
    assert "self.optimizer.clear_backward_seen_flag()" in inspect.getsource(DeepSpeedEngine)
    assert hasattr(DeepSpeedEngine, "set_gradient_accumulation_boundary")
    for stage in ("stage_1_and_2", "stage3"):
        assert "def clear_backward_seen_flag(self)" in source_of(stage)


def test_what_is_reduced_already_is_forgotten() -> None:
    from deepspeed.runtime.zero.stage_1_and_2 import INITIAL_MICRO_STEP_ID

    cleared: list[str] = []
    some: Any = {"zero_grad": lambda: cleared.append("zero_grad"), "micro_step_id": 3}
    optimizer: Any = SimpleNamespace(averaged_gradients={0: "some", 1: "some"}, all_grad_tensors={0: "some"}, **some)
    compat.discard_reduced_gradients(optimizer)
    assert cleared == ["zero_grad"] and optimizer.micro_step_id == INITIAL_MICRO_STEP_ID
    three = SimpleNamespace(averaged_gradients={0: "some"}, fp16_groups=[], **some)
    compat.discard_reduced_gradients(three)
    assert three.micro_step_id == 0 and "self.micro_step_id = 0" in source_of("stage3")
    assert optimizer.averaged_gradients == {0: None, 1: None}
    assert optimizer.all_grad_tensors == {0: None}


def test_the_context_that_cuts_modules_up_pauses_within(monkeypatch: pytest.MonkeyPatch) -> None:
    from deepspeed.runtime.zero import partition_parameters

    called: list[str] = []
    names = ("unpatch_init_and_builtins", "patch_init_and_builtins")
    assert all(hasattr(partition_parameters.Init, name) for name in names)
    pause, go_on = ((lambda name=name: called.append(name)) for name in names)
    context = SimpleNamespace(unpatch_init_and_builtins=pause, patch_init_and_builtins=go_on)
    monkeypatch.setattr(partition_parameters, "top_level_context", context)
    with compat.whole_parameters():
        assert called == ["unpatch_init_and_builtins"]
    assert called == list(names)


def test_zero_keeps_what_is_read_under_these_names() -> None:
    one_and_two, three, partitioned = map(source_of, ("stage_1_and_2", "stage3", "partition_parameters"))
    for name in ("averaged_gradients", "all_grad_tensors", "cpu_offload"):
        assert f"self.{name}" in one_and_two
    assert "def reset_cpu_buffers(self)" in one_and_two
    for name in ("fp16_groups", "averaged_gradients"):
        assert f"self.{name}" in three
    for name in ("ds_id", "ds_tensor"):
        assert f"param.{name} = " in partitioned
