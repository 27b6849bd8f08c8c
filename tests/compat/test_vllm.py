"""Every private name of vLLM that LightRL uses is there, with the arguments and attributes that it is used by.

A failure here says what changed in vLLM, and `NAMES` what each name is for. No engine is started.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import os
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

pytest.importorskip("vllm")
pytestmark = pytest.mark.vllm

from lightrl.compat import vllm_parsers as parsers_side  # noqa: E402 - vLLM is asked for first
from lightrl.compat import vllm_worker as worker_side  # noqa: E402
from tests.toys import quickstart_model  # noqa: E402

ROOT = Path(__file__).parents[2] / "lightrl"
NAMES = {  # "module:attribute" -> what it is used for
    "vllm.v1.engine.llm_engine:LLMEngine.add_request": "adds requests with our own IDs while others run",
    "vllm.v1.engine.llm_engine:LLMEngine.step": "returns groups as they finish",
    "vllm.v1.engine.llm_engine:LLMEngine.abort_request": "cancels requests",
    "vllm.v1.engine.output_processor:OutputProcessor.__init__": "request_states has partial results",
    "vllm.v1.engine.output_processor:RequestState.make_request_output": "partial results as an output",
    "vllm.v1.engine:FinishReason.ABORT": "finish reason of such an output",
    "vllm.v1.engine.llm_engine:LLMEngine.has_unfinished_requests": "whether requests are in flight",
    "vllm.v1.engine.llm_engine:LLMEngine.reset_prefix_cache": "drops keys and values of old weights",
    "vllm.v1.engine.llm_engine:LLMEngine.reset_encoder_cache": "drops image features of old weights",
    "vllm.v1.engine.llm_engine:LLMEngine.add_lora": "replaces the adapter",
    "vllm.v1.engine.core_client:InprocClient.shutdown": "ends an engine in the trainer's process",
    "vllm.distributed.parallel_state:destroy_distributed_environment": "replaced: it ends the trainer's process group",
    "vllm.envs:disable_envs_cache": "an earlier engine froze the environment variables",
    "vllm.platforms:current_platform": "simple_compile_backend: compiling the CPU sampler takes 12 s",
    "vllm.v1.executor.uniproc_executor:UniProcExecutor": "single-process CPU engine",
    "vllm.distributed.weight_transfer.nccl_common:trainer_init": "the trainer's side of a server's weight transfer",
    "vllm.v1.engine.core:EngineCoreProc.pause_scheduler": "changes weights between two steps, keeping requests",
    "vllm.v1.engine.core:EngineCoreProc.resume_scheduler": "continues requests",
    "vllm.v1.engine.core_client:SyncMPClient.get_output": "replaced: it waits forever for a dead or stopped core",
    "vllm.v1.engine.core_client:SyncMPClient.call_utility": "replaced for the same reason",
    "vllm.v1.engine.core_client:SyncMPClient._send_input": "calls the core without waiting",
    "vllm.v1.engine.core_client:MPClient._format_exception": "called by the replaced get_output",
    "vllm.v1.engine.core_client:MPClient.ensure_alive": "whether the core is alive",
    "vllm.v1.engine.core_client:MPClient.shutdown": "ends the core's process",
    "vllm.v1.engine.core_client:BackgroundResources": "engine_manager has the core's processes",
    "vllm.v1.engine:EngineCoreRequestType.UTILITY": "message type of a call",
    "vllm.v1.engine.exceptions:EngineDeadError": "vLLM's error for a dead core",
    "vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method:UnquantizedFusedMoEMethod._setup_kernel": (
        "replaced on CPUs: a reload doesn't pack experts"
    ),
    "vllm.lora.punica_wrapper.punica_cpu:PunicaWrapperCPU.add_lora_logits": "replaced: it fails on prompt log-probs",
    "vllm.model_executor.layers.utils:dispatch_cpu_unquantized_gemm": "replaced: packed weights can't be updated",
    "vllm.model_executor.model_loader.reload:initialize_layerwise_reload": "loads weights that vLLM has rearranged",
    "vllm.model_executor.model_loader.reload:finalize_layerwise_reload": "the same",
    "vllm.v1.worker.gpu_model_runner:GPUModelRunner.get_model": "the module that receives weights",
    "vllm.v1.sample.logits_processor:LogitsProcessor": "FIRE sampling",
    "vllm.v1.sample.logits_processor.builtin:process_dict_updates": "tracks the batch, as vLLM's own processors do",
    "vllm.entrypoints.openai.chat_completion.protocol:ChatCompletionRequest": "input of its tool parsers",
    "vllm.tool_parsers:ToolParserManager": "its tool parsers by name",
    "vllm.reasoning:ReasoningParserManager": "its reasoning parsers by name",
    "vllm.tool_parsers.tool_strict_level:ToolStrictLevel": "how closely a grammar of tool calls follows the schemas",
    "vllm.parser.abstract_parser:structured_outputs_to_format": "grammars of completions without tool calls",
    "vllm.v1.structured_output.backend_xgrammar:XgrammarBackend.compile_grammar": "the grammar that masks logits",
    "vllm.v1.structured_output.request:get_structured_output_key": "what it is compiled from",
    "vllm.v1.engine.input_processor:InputProcessor.process_inputs": "tokens that end a completion",
}
SOURCES = {  # what replaced functions touch, as vLLM's own source says it
    "vllm.v1.engine.core_client:SyncMPClient.get_output": [
        "self.outputs_queue.get(",
        "wave_complete",
        "engines_running",
    ],
    "vllm.v1.engine.core_client:SyncMPClient.call_utility": [
        "uuid.uuid1().int >> 64",
        "self.utility_results[call_id] = future",
        "self._send_input(EngineCoreRequestType.UTILITY, (0, call_id, method, args))",
    ],
    "vllm.v1.engine.core_client:BackgroundResources": ["engine_manager", "engine_dead"],
    "vllm.distributed.parallel_state:destroy_distributed_environment": [
        "_WORLD.destroy()",
        "_WORLD = None",
        "_NODE_COUNT = None",
    ],
}


def find(name: str) -> Any:
    module, _, path = name.partition(":")
    found = importlib.import_module(module)
    for part in path.split("."):
        found = getattr(found, part)
    return found


@pytest.mark.parametrize("name", NAMES)
def test_the_name_is_there(name: str) -> None:
    module, _, attribute = name.partition(":")
    try:
        find(name)
    except (ImportError, AttributeError) as error:
        pytest.fail(f"vLLM has no {attribute} in {module} any more ({error}); it is used for: {NAMES[name]}")


@pytest.mark.parametrize("name", SOURCES)
def test_what_is_replaced_still_reads_like_this(name: str) -> None:
    source = inspect.getsource(find(name))
    assert [part for part in SOURCES[name] if part not in source] == []


def test_logits_processors_have_the_methods_that_fire_sampling_gives_them() -> None:
    base = find("vllm.v1.sample.logits_processor:LogitsProcessor")
    assert base.__abstractmethods__ <= {"__init__", "apply", "is_argmax_invariant", "update_state"}
    assert list(inspect.signature(base.__init__).parameters)[1:] == ["vllm_config", "device", "is_pin_memory"]


def test_every_import_from_the_inside_of_vllm_is_declared() -> None:
    """In compat vLLM's inner modules are listed above, except those that vLLM documents; elsewhere there are none."""
    documented = {"vllm", "vllm.sampling_params", "vllm.lora.request"}
    modules = {name.partition(":")[0] for name in NAMES}
    for path in ROOT.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            named = [node.module or ""] if isinstance(node, ast.ImportFrom) and not node.level else []
            named += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            inside = [module for module in named if module.split(".")[0] == "vllm" and module not in documented]
            if path.parent.name == "compat":
                assert [module for module in inside if module not in modules] == [], path
            else:
                assert inside == [], path


def test_the_note_about_numa_nodes_is_dropped_and_other_messages_are_kept(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def bind(nodes: list[int]) -> int:
        os.write(2, b"[W] Warning: NUMA binding: Using MEMBIND policy\nnumactl failed\n")
        return nodes[0]

    monkeypatch.setattr(worker_side, "_bind", bind, raising=False)
    assert worker_side._bind_memory([3]) == 3
    assert capfd.readouterr().err == "numactl failed\n"


@pytest.mark.parametrize(("argument", "name"), [("reasoning_parser", "deepseek_r1"), ("tool_parser", "deepseek_v3")])
def test_a_parser_of_another_family_is_rejected(argument: str, name: str, tmp_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(quickstart_model(tmp_path, num_hidden_layers=1))
    with pytest.raises(RuntimeError, match="token"):
        getattr(parsers_side, argument)(name, tokenizer)


PARAMETERS = {
    "vllm.v1.engine.llm_engine:LLMEngine.add_request": ["request_id", "prompt", "params", "lora_request"],
    "vllm.v1.engine.llm_engine:LLMEngine.step": [],
    "vllm.v1.engine.llm_engine:LLMEngine.abort_request": ["request_ids"],
    "vllm.v1.engine.llm_engine:LLMEngine.reset_prefix_cache": ["reset_running_requests"],
    "vllm.v1.engine.llm_engine:LLMEngine.add_lora": ["lora_request"],
    "vllm.v1.engine.core_client:SyncMPClient.get_output": [],
    "vllm.v1.engine.core_client:SyncMPClient.call_utility": ["method", "args"],
    "vllm.v1.engine.core_client:SyncMPClient._send_input": ["request_type", "request"],
    "vllm.v1.engine.core_client:MPClient._format_exception": ["e"],
    "vllm.v1.engine.core_client:MPClient.ensure_alive": [],
    "vllm.v1.engine.core_client:MPClient.shutdown": ["timeout"],
    "vllm.v1.engine.core_client:InprocClient.shutdown": ["timeout"],
    "vllm.distributed.parallel_state:destroy_distributed_environment": [],
    "vllm.distributed.weight_transfer.nccl_common:trainer_init": ["init_info"],
    "vllm.model_executor.layers.utils:dispatch_cpu_unquantized_gemm": ["layer", "remove_weight"],
    "vllm.model_executor.model_loader.reload:initialize_layerwise_reload": ["model"],
    "vllm.v1.sample.logits_processor.builtin:process_dict_updates": ["req_entries", "batch_update", "new_state"],
}


@pytest.mark.parametrize("name", PARAMETERS)
def test_it_takes_the_arguments_that_it_is_called_with(name: str) -> None:
    function = worker_side._pack_gemm if "dispatch_cpu" in name else find(name)  # ours stands in its place now
    inner = [cell.cell_contents for cell in getattr(function, "__closure__", None) or ()]
    function = next((f for f in inner if inspect.isfunction(f)), function)  # under a decorator that hides it
    parameters = [p for p in inspect.signature(function).parameters if p != "self"]
    assert [p for p in PARAMETERS[name] if p not in parameters] == [], f"{name}{inspect.signature(function)}"
