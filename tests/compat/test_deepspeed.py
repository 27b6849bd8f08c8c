"""What is read of DeepSpeed's own objects. What it does in training is tested in tests/distributed."""

from __future__ import annotations

import inspect
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from lightrl.compat import deepspeed as compat

pytest.importorskip("deepspeed")


def source_of(name: str) -> str:
    from importlib import import_module

    return inspect.getsource(import_module(f"deepspeed.runtime.zero.{name}"))


def test_zero_keeps_what_is_read_under_these_names() -> None:
    one_and_two, three, partitioned = map(source_of, ("stage_1_and_2", "stage3", "partition_parameters"))
    for name in ("averaged_gradients", "all_grad_tensors", "cpu_offload", "bit16_groups"):
        assert f"self.{name}" in one_and_two
    assert "self.single_partition_of_fp32_groups" in one_and_two
    assert "def reset_cpu_buffers(self)" in one_and_two
    for name in ("fp16_groups", "fp32_partitioned_groups_flat", "grad_position", "averaged_gradients"):
        assert f"self.{name}" in three
    assert "def get_param_id(self, param)" in three
    for name in ("ds_id", "ds_tensor"):
        assert f"param.{name} = " in partitioned


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


def test_the_place_of_a_parameter_in_zero_3_is_id_offset_and_length() -> None:
    assert "self.grad_position[param_id] = [int(i), int(current_offset), int(num_elements)]" in source_of("stage3")


def test_the_place_of_a_parameter_in_zero_1_and_2_has_two_addresses() -> None:
    from deepspeed.utils.tensor_fragment import fragment_address, tensor_fragment

    assert {"start", "numel"} <= set(fragment_address.__dataclass_fields__)
    assert "lp_fragment_address" in tensor_fragment.__dataclass_fields__
    assert hasattr(tensor_fragment, "get_hp_fragment_address")


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


def test_the_part_of_a_parameter() -> None:
    three = SimpleNamespace(grad_position={7: [0, 40, 6]}, get_param_id=lambda parameter: 7)
    assert compat.flat_part(three, 3, None, rank=2) == (40, 12, 6)
    address = SimpleNamespace
    mapping = SimpleNamespace(
        get_hp_fragment_address=lambda: address(start=9, numel=4), lp_fragment_address=address(start=3, numel=4)
    )
    assert compat.flat_part(None, 2, SimpleNamespace(_hp_mapping=mapping), rank=0) == (9, 3, 4)
    assert compat.flat_part(None, 2, SimpleNamespace(_hp_mapping=None), rank=0) is None


def test_a_plain_parameter_is_not_partitioned() -> None:
    assert not compat.is_partitioned(nn.Parameter(torch.zeros(2)))
