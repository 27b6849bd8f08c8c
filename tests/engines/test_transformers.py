"""The transformers engine against plain forwards, Hugging Face's generate, and numbers worked by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from lightrl.engines.transformers.cpu_decoder import CPUDecoder
from lightrl.engines.transformers.decoders import CacheDecoder
from lightrl.engines.transformers.engine import TransformersEngine
from lightrl.engines.transformers.sampling import completion_uniforms, distribution, sample
from lightrl.records import CompletionGroup, EngineContext, GenerationRequest, Prompts, SamplingParams
from tests.engines.conftest import ask, save_tokenizer
from tests.toys import build

CHARS = ["<pad>", "<eos>", "<bos>", *"0123456789+-*= ?abcdefghijklmnopqrstuvwxyz\n()"]
SIZES: dict[str, Any] = {
    "vocab_size": 48, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 128, "bos_token_id": 2, "eos_token_id": 1, "pad_token_id": 0,
    "initializer_range": 0.3,
}  # fmt: skip
KINDS: dict[str, dict[str, Any]] = {
    "qwen2": {"tie_word_embeddings": True},
    "llama": {"attention_bias": True, "mlp_bias": True},
    "qwen3": {"head_dim": 16},
    "sliding": {"sliding_window": 7},
}
OTHERS: dict[str, dict[str, Any]] = {
    "gpt2": {},
    "gemma3": {"head_dim": 16, "sliding_window": 6, "layer_types": ["sliding_attention", "full_attention"]},
    "lfm2": {"layer_types": ["conv", "full_attention"], "block_auto_adjust_ff_dim": False},
}
FAMILIES = {"sliding": "mistral", "gpt2": "GPT2", "gemma3": "Gemma3Text"}
PROMPTS = [[5, 6, 7], [8], [9, 10, 11, 12, 13, 14, 15], [16, 17, 18, 19, 20, 21, 22, 23, 24, 25, 26], [5, 6, 8]]


def save(kind: str, folder: Path) -> str:
    model = build(FAMILIES.get(kind, kind), **SIZES, **(KINDS | OTHERS)[kind])
    for parameter in model.parameters():  # biases and norms would otherwise be zeros and ones
        if parameter.ndim == 1:
            parameter.data += 0.2 * torch.randn_like(parameter)
    model.save_pretrained(folder)
    save_tokenizer(folder, "".join(CHARS[3:]))
    return str(folder)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    torch.set_num_threads(1)
    return {kind: save(kind, tmp_path_factory.mktemp(kind)) for kind in KINDS}


def start(path: str, **arguments: Any) -> TransformersEngine:
    engine = TransformersEngine(**arguments)
    engine.start(EngineContext(path))
    return engine


@pytest.fixture(scope="module")
def engines(folders: dict[str, str]) -> dict[str, TransformersEngine]:
    return {kind: start(path, cpu_kernels=True) for kind, path in folders.items()}


def prompts_of(token_ids: list[list[int]]) -> Prompts:
    return Prompts(token_ids=token_ids, texts=["".join(CHARS[t] for t in ids) for ids in token_ids])


def run(
    engine: TransformersEngine, token_ids: list[list[int]], sampling: SamplingParams, g: int = 3, seeds: Any = None
) -> list[CompletionGroup]:
    seeds = range(100, 100 + len(token_ids)) if seeds is None else seeds
    groups = dict(ask(engine, prompts_of(token_ids), sampling, num_completions=g, seeds=list(seeds)))
    assert sorted(groups) == list(range(len(token_ids)))
    return [groups[i] for i in sorted(groups)]


def tokens_of(groups: list[CompletionGroup]) -> list[list[list[int]]]:
    return [[c.token_ids for c in group.completions] for group in groups]


@pytest.mark.parametrize(
    ("kind", "limits"),
    [*((kind, {}) for kind in KINDS), ("qwen2", {"max_sequences": 7}), ("sliding", {"max_batch_tokens": 80})],
)
def test_logprobs_equal_a_plain_forward(folders: dict[str, str], kind: str, limits: dict[str, int]) -> None:
    """Unequal prompts, unequal completions, compaction, refills: each log-prob is that of a forward of its row."""
    engine = start(folders[kind], **limits)
    model = AutoModelForCausalLM.from_pretrained(folders[kind])
    groups = run(engine, PROMPTS, SamplingParams(max_new_tokens=24, temperature=0.7, stop_token_ids=[30, 31, 32]))
    check_logprobs(model, PROMPTS, groups, 0.7, 2e-5)
    lengths = {len(c.token_ids) for group in groups for c in group.completions}
    assert len(lengths) > 3  # else this would not test compaction


def check_logprobs(
    model: Any, prompts: list[list[int]], groups: list[CompletionGroup], temperature: float, tolerance: float
) -> None:
    """Each log-prob is that of a plain forward of its row alone."""
    for prompt, group in zip(prompts, groups, strict=True):
        assert len(group.completions) == 3
        for completion in group.completions:
            ids = torch.tensor([prompt + completion.token_ids])
            with torch.no_grad():
                logits = model(ids).logits[0, len(prompt) - 1 : -1].float() / temperature
            expected = logits.log_softmax(-1).gather(-1, ids[0, len(prompt) :, None])[:, 0]
            assert torch.allclose(torch.tensor(completion.logprobs), expected, atol=tolerance)


@pytest.mark.parametrize("kind", ["gpt2", "gemma3", "lfm2"])
def test_any_decoder_works(tmp_path: Path, kind: str) -> None:
    """Absolute positions, sliding and full attention mixed, recurrent layers: through transformers' own cache."""
    engine = start(save(kind, tmp_path))
    assert engine._cpu_model is None
    groups = run(engine, PROMPTS, SamplingParams(max_new_tokens=16, stop_token_ids=[30, 31, 32]))
    check_logprobs(engine._model, PROMPTS, groups, 1.0, 2e-5)


@pytest.mark.parametrize("kind", ["qwen2", "sliding"])
def test_long_completions(engines: dict[str, TransformersEngine], kind: str) -> None:
    """Beyond the columns that there is room for at first."""
    groups = run(engines[kind], PROMPTS, SamplingParams(max_new_tokens=110, ignore_eos=True))
    check_logprobs(engines[kind]._model, PROMPTS, groups, 1.0, 5e-5)


def test_extra_inputs_reach_the_model_once_per_prompt(engines: dict[str, TransformersEngine]) -> None:
    prompts = prompts_of(PROMPTS[:3])
    prompts.inputs = [{}, {"picture": "one"}, {"picture": "two"}]
    seen: list[Any] = []

    def take_picture(module: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        if "picture" in kwargs:
            seen.append((kwargs.pop("picture"), kwargs["input_ids"].tolist()))
        return args, kwargs

    engine = engines["qwen2"]
    hook = engine._model.register_forward_pre_hook(take_picture, with_kwargs=True)
    asked = ask(engine, prompts, SamplingParams(max_new_tokens=6), num_completions=3, seeds=[100, 101, 102])
    groups = [group for _, group in asked]
    hook.remove()
    assert sorted(seen) == [("one", [PROMPTS[1]]), ("two", [PROMPTS[2]])]
    assert tokens_of(groups) == tokens_of(run(engine, PROMPTS[:3], SamplingParams(max_new_tokens=6)))


@pytest.mark.parametrize("kind", list(KINDS))
def test_greedy_equals_hf_generate(folders: dict[str, str], engines: dict[str, TransformersEngine], kind: str) -> None:
    model = AutoModelForCausalLM.from_pretrained(folders[kind])
    groups = run(engines[kind], PROMPTS, SamplingParams(max_new_tokens=16, temperature=0), g=1)
    for prompt, group in zip(PROMPTS, groups, strict=True):
        expected = model.generate(torch.tensor([prompt]), max_new_tokens=16, do_sample=False)[0, len(prompt) :]
        assert group.completions[0].token_ids == expected.tolist()


@pytest.mark.parametrize("kind", ["qwen2", "sliding"])
def test_results_depend_on_seed_and_position_alone(engines: dict[str, TransformersEngine], kind: str) -> None:
    sampling = SamplingParams(max_new_tokens=12)
    whole = run(engines[kind], PROMPTS, sampling)
    again = run(engines[kind], PROMPTS, sampling)
    assert [c for group in whole for c in group.completions] == [c for group in again for c in group.completions]
    backwards = run(engines[kind], PROMPTS[::-1], sampling, seeds=range(104, 99, -1))
    assert tokens_of(backwards)[::-1] == tokens_of(whole)
    for i, prompt in enumerate(PROMPTS):
        assert tokens_of(run(engines[kind], [prompt], sampling, seeds=[100 + i])) == [tokens_of(whole)[i]]
    # A larger group begins with the smaller one's completions, and other seeds give other completions.
    assert tokens_of(run(engines[kind], PROMPTS[:1], sampling, g=5))[0][:3] == tokens_of(whole)[0]
    assert tokens_of(run(engines[kind], PROMPTS[:1], sampling, seeds=[7])) != [tokens_of(whole)[0]]
    assert len({tuple(c) for c in tokens_of(whole)[0]}) == 3


def test_tokens_follow_the_distribution(folders: dict[str, str], engines: dict[str, TransformersEngine]) -> None:
    """4,000 first tokens: chi-square of 47 degrees of freedom is below 82.7 with probability 0.999."""
    n = 4000
    groups = run(engines["qwen2"], [[5, 6]], SamplingParams(max_new_tokens=1, temperature=2.0), g=n, seeds=[3])
    counts = torch.bincount(torch.tensor([c.token_ids[0] for c in groups[0].completions]), minlength=48)
    with torch.no_grad():
        logits = AutoModelForCausalLM.from_pretrained(folders["qwen2"])(torch.tensor([[5, 6]])).logits[0, -1]
    expected = n * (logits / 2).softmax(-1)
    large = expected >= 5
    statistic = ((counts - expected)[large].square() / expected[large]).sum()
    assert large.sum() >= 20
    assert statistic < 82.7


def test_distribution_by_hand() -> None:
    """Probabilities 0.5, 0.3, 0.15, 0.05."""
    logits = torch.tensor([[0.5, 0.3, 0.15, 0.05]]).log()

    def kept(**settings: Any) -> list[float]:
        p = distribution(logits, SamplingParams(**settings))[0]
        return [round(x, 4) for x in (p / p.sum()).tolist()]

    assert kept() == [0.5, 0.3, 0.15, 0.05]
    assert kept(top_k=2) == [0.625, 0.375, 0, 0]
    assert kept(top_k=9) == [0.5, 0.3, 0.15, 0.05]
    assert kept(top_p=0.75) == [0.625, 0.375, 0, 0]  # 0.5 is too little, 0.8 is enough
    assert kept(top_p=0.4) == [1, 0, 0, 0]
    assert kept(min_p=0.2) == [0.5263, 0.3158, 0.1579, 0]  # at least 0.1; 0.5 / 0.95
    assert kept(top_k=3, top_p=0.8) == [0.625, 0.375, 0, 0]  # of 0.5/0.95 + 0.3/0.95 = 0.842
    # temperature 0.5 squares: 0.25, 0.09, 0.0225, 0.0025 over 0.365
    assert kept(temperature=0.5) == [0.6849, 0.2466, 0.0616, 0.0068]
    # ties with the last kept token are kept: the result must not depend on how a sort breaks them
    even = distribution(torch.zeros(1, 4), SamplingParams(top_k=2))[0]
    assert even.tolist() == [0.25] * 4


def test_repetition_penalty_by_hand() -> None:
    """Seen logits 2 and -2 become 1 and -4 with penalty 2; the unseen 1 stays."""
    seen = torch.tensor([[True, True, False]])
    got = distribution(torch.tensor([[2.0, -2.0, 1.0]]), SamplingParams(repetition_penalty=2.0), seen=seen)
    assert torch.allclose(got, torch.tensor([[1.0, -4.0, 1.0]]).softmax(-1))


def test_sample_inverts_the_cumulative_sum() -> None:
    """F = 0.5, 0.8, 0.95, 1: u = 0 and 0.49 give token 0, 0.5 token 1, 0.94 token 2, the largest u token 3."""
    logits = torch.tensor([0.5, 0.3, 0.15, 0.05]).log().expand(5, 4)
    u = torch.tensor([0.0, 0.49, 0.5001, 0.94, 1 - 2**-40], dtype=torch.float64)
    tokens, logprobs, _ = sample(logits, SamplingParams(), u)
    assert tokens.tolist() == [0, 0, 1, 2, 3]
    assert torch.allclose(logprobs.exp(), torch.tensor([0.5, 0.5, 0.3, 0.15, 0.05]))
    # Renormalised over the nucleus {0, 1}: F = 0.625, 1.
    tokens, logprobs, _ = sample(logits, SamplingParams(top_p=0.75), u)
    assert tokens.tolist() == [0, 0, 0, 1, 1]
    assert torch.allclose(logprobs.exp(), torch.tensor([0.625, 0.625, 0.625, 0.375, 0.375]))


def test_wide_nucleus_takes_the_sort() -> None:
    """4,096 equal tokens: no 1,024 of them hold the nucleus, and by the rule for ties all are kept."""
    assert (distribution(torch.zeros(2, 4096), SamplingParams(top_p=0.9)) > 0).all()


def test_uniforms_are_stable_and_unrelated() -> None:
    a = completion_uniforms(5, 0, 1000)
    assert torch.equal(a[:10], completion_uniforms(5, 0, 10))
    for other in (completion_uniforms(5, 1, 1000), completion_uniforms(6, 0, 1000), completion_uniforms(-5, 0, 1000)):
        assert abs(torch.corrcoef(torch.stack([a, other]))[0, 1]) < 0.12  # 3.8 standard errors
    assert a.min() >= 0
    assert a.max() < 1


@pytest.mark.parametrize("kind", ["qwen2", "sliding"])
def test_cut_distributions_are_sampled_and_reported(engines: dict[str, TransformersEngine], kind: str) -> None:
    """exp(log-probs) are of the renormalised distribution: recomputed from a plain forward, repetitions included."""
    settings: dict[str, Any] = {"temperature": 1.5, "top_k": 6, "top_p": 0.9, "min_p": 0.02, "repetition_penalty": 1.3}
    sampling = SamplingParams(max_new_tokens=10, **settings)
    model = engines[kind]._model
    for prompt, group in zip(PROMPTS, run(engines[kind], PROMPTS, sampling), strict=True):
        for completion in group.completions:
            row = prompt + completion.token_ids
            with torch.no_grad():
                logits = model(torch.tensor([row])).logits[0]
            for t in range(len(prompt), len(row)):
                seen = torch.zeros(1, 48, dtype=torch.bool)
                seen[0, row[:t]] = True
                p = distribution(logits[t - 1 : t], sampling, seen=seen)[0]
                expected = (p / p.sum())[row[t]].log().item()
                assert completion.logprobs[t - len(prompt)] == pytest.approx(expected, abs=1e-4)


def test_ends(engines: dict[str, TransformersEngine]) -> None:
    """End-of-sequence and stop tokens end a completion, are part of it, do not come early, and can be ignored."""
    engine = engines["qwen2"]
    ends = {1, *range(20, 30)}
    stop_ids = sorted(ends - {1})
    groups = run(engine, PROMPTS, SamplingParams(max_new_tokens=20, stop_token_ids=stop_ids), g=8)
    completions = [c for group in groups for c in group.completions]
    assert {c.finish_reason for c in completions} == {"stop", "length"}
    for c in completions:
        assert not ends & set(c.token_ids[:-1])
        assert c.finish_reason == ("stop" if c.token_ids[-1] in ends else "length")
        assert c.finish_reason == "stop" or len(c.token_ids) == 20
    late = run(engine, PROMPTS, SamplingParams(max_new_tokens=20, min_new_tokens=6, stop_token_ids=stop_ids), g=8)
    for c in (c for group in late for c in group.completions):
        assert len(c.token_ids) >= 6
        assert not ends & set(c.token_ids[:5])
    free = run(engine, PROMPTS, SamplingParams(max_new_tokens=20, ignore_eos=True), g=8)
    assert all(len(c.token_ids) == 20 for group in free for c in group.completions)
    assert any(1 in c.token_ids for group in free for c in group.completions)


def test_text_and_tokens_end_with_the_stop_string(engines: dict[str, TransformersEngine]) -> None:
    sampling = SamplingParams(max_new_tokens=60, stop=["a", "7"])
    completions = [c for group in run(engines["qwen2"], PROMPTS, sampling, g=8) for c in group.completions]
    hit = [c for c in completions if CHARS[c.token_ids[-1]] in ("a", "7")]
    assert hit
    for c in hit:
        assert c.finish_reason == "stop"
        assert c.text == "".join(CHARS[t] for t in c.token_ids if t > 2)
    for c in completions:
        assert "a" not in c.text[:-1] and "7" not in c.text[:-1]
    late = run(engines["qwen2"], PROMPTS, SamplingParams(max_new_tokens=60, min_new_tokens=9, stop=["a", "7"]), g=8)
    for c in (c for group in late for c in group.completions):
        before = "".join(CHARS[t] for t in c.token_ids[:8] if t > 2)
        assert len(c.token_ids) >= 9
        assert c.text.startswith(before)
        assert "a" not in c.text[len(before) : -1] and "7" not in c.text[len(before) : -1]
    assert any("a" in "".join(CHARS[t] for t in c.token_ids[:8]) for group in late for c in group.completions)


def test_stop_string_over_several_tokens(engines: dict[str, TransformersEngine]) -> None:
    """A pair of characters that a free run shows ends a run that stops at it, at the same place."""
    free = run(engines["qwen2"], [[5, 6]], SamplingParams(max_new_tokens=30, ignore_eos=True), g=1)[0].completions[0]
    pair = free.text[10:12]
    cut = run(engines["qwen2"], [[5, 6]], SamplingParams(max_new_tokens=30, ignore_eos=True, stop=[pair]), g=1)
    assert cut[0].completions[0].text == free.text[: free.text.index(pair) + 2]
    count = len(cut[0].completions[0].token_ids)
    assert count < len(free.token_ids)
    # The same where the stop string is complete with the last token that is allowed.
    tight = SamplingParams(max_new_tokens=count, ignore_eos=True, stop=[pair])
    assert run(engines["qwen2"], [[5, 6]], tight, g=1)[0].completions == cut[0].completions


def test_groups_stream_out(engines: dict[str, TransformersEngine], monkeypatch: pytest.MonkeyPatch) -> None:
    """A group comes when its completions are done: here the others, which wait for room, have not been computed."""
    prefilled: list[int] = []
    for decoder in (CacheDecoder, CPUDecoder):
        plain = decoder.prefill
        monkeypatch.setattr(
            decoder, "prefill", lambda self, p, *a, plain=plain: prefilled.extend(p) or plain(self, p, *a)
        )
    for kind in ("qwen2", "sliding"):
        monkeypatch.setattr(engines[kind], "max_sequences", 2)
        sampling = SamplingParams(max_new_tokens=4, ignore_eos=True)
        requests = [prompts_of(PROMPTS).request(i, sampling, 1, 2) for i in range(5)]
        prefilled.clear()
        done: list[GenerationRequest] = []
        engines[kind].add(requests)
        while len(done) < 5:
            done += [group.request for group in engines[kind].step()]
            assert len(prefilled) <= len(done) + 1 and not torch.is_inference_mode_enabled()
        assert done[0] is requests[3]  # the longest goes first
        assert sorted(prefilled) == sorted(PROMPTS)  # each once, not once per completion


def test_global_generators_are_untouched(folders: dict[str, str]) -> None:
    torch.manual_seed(1)
    before = torch.random.get_rng_state()
    engine = start(folders["qwen2"])
    run(engine, PROMPTS, SamplingParams(max_new_tokens=5))
    random_one = TransformersEngine()
    random_one.start(EngineContext(folders["qwen2"], random_init=True, seed=3))
    assert torch.equal(before, torch.random.get_rng_state())


@pytest.mark.parametrize("kind", ["qwen2", "llama"])
def test_load_weights(folders: dict[str, str], kind: str) -> None:
    """A random engine becomes the reference by loading it; tied once or twice; everything it reports follows."""
    source = start(folders[kind])
    engine = TransformersEngine()
    engine.start(EngineContext(folders[kind], random_init=True, seed=5))
    assert engine.policy_version == -1
    rows = [[5, 6, 7, 8, 9], [10, 11], [12]]
    assert abs(engine.logprobs(rows)[0][0] - source.logprobs(rows)[0][0]) > 1e-3
    engine.load_weights(list(source._model.named_parameters()), policy_version=4)
    assert engine.policy_version == 4
    assert engine.logprobs(rows) == source.logprobs(rows)
    assert [len(row) for row in engine.logprobs(rows)] == [4, 1, 0]
    sampling = SamplingParams(max_new_tokens=8)
    mine, theirs = run(engine, PROMPTS, sampling), run(source, PROMPTS, sampling)
    assert tokens_of(mine) == tokens_of(theirs)
    assert {group.policy_version for group in mine} == {4}


def test_load_weights_lists_what_is_wrong(folders: dict[str, str]) -> None:
    engine = start(folders["qwen2"])
    weights = dict(engine._model.named_parameters())
    engine.load_weights(weights.items(), policy_version=1)
    wrong = {name: tensor for name, tensor in weights.items() if "layers.1.mlp.up_proj" not in name}
    wrong["model.nowhere"] = torch.zeros(1)
    wrong["model.norm.weight"] = torch.zeros(3)
    with pytest.raises(ValueError, match=r"1\.mlp\.up_proj\.weight.*model\.norm\.weight \(3,\).*model\.nowhere"):
        engine.load_weights(wrong.items(), policy_version=2)
    assert engine.policy_version == -1


@pytest.mark.parametrize(
    ("sampling", "message"),
    [
        ({"regex": "a+"}, "regex.*VLLMEngine"),
        ({"extra": {"bad_words": ["a"]}}, "extra.*VLLMEngine"),
        ({"max_new_tokens": 126}, "max_new_tokens=126.*max_model_len=128"),
    ],
)
def test_refusals(engines: dict[str, TransformersEngine], sampling: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        run(engines["qwen2"], [[5, 6, 7]], SamplingParams(**sampling), g=1)


def test_bfloat16(folders: dict[str, str]) -> None:
    engine = start(folders["qwen2"], dtype="bfloat16")
    assert engine._model.dtype == torch.bfloat16
    groups = run(engine, PROMPTS, SamplingParams(max_new_tokens=8))
    for prompt, group in zip(PROMPTS, groups, strict=True):
        for completion in group.completions:
            expected = engine.logprobs([prompt + completion.token_ids])[0][len(prompt) - 1 :]
            assert torch.allclose(torch.tensor(completion.logprobs), torch.tensor(expected), atol=0.15)


# ------------------------------------------------------------------------------------------- requests join and leave


def completions_of(engine: TransformersEngine, request: GenerationRequest) -> list[list[int]]:
    (group,) = engine.generate_all([request])
    assert group.request is request
    return [c.token_ids for c in group.completions]


@pytest.mark.parametrize(("kind", "room"), [("qwen2", 5), ("sliding", 256)])
def test_requests_of_different_settings_go_together(
    engines: dict[str, TransformersEngine], kind: str, room: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Lengths, limits, temperatures, cuts, penalties, stops, group sizes: each request gets what it would get alone."""
    settings: list[dict[str, Any]] = [
        {"max_new_tokens": 20},
        {"max_new_tokens": 7, "temperature": 0.6, "repetition_penalty": 1.4},
        {"max_new_tokens": 30, "stop": ["a", "7"]},
        {"max_new_tokens": 12, "top_k": 3, "fire_temperature": 4.0, "ignore_eos": True},
        {"max_new_tokens": 25, "min_new_tokens": 9, "stop_token_ids": [30, 31, 32]},
    ]
    prompts = prompts_of(PROMPTS)
    requests = [prompts.request(i, SamplingParams(**s), 50 + i, 1 + i % 3) for i, s in enumerate(settings)]
    monkeypatch.setattr(engines[kind], "max_sequences", room)
    groups = {group.request: group for group in engines[kind].generate_all(requests)}
    assert set(groups) == set(requests)
    for request in requests:
        assert [c.token_ids for c in groups[request].completions] == completions_of(engines[kind], request)
    assert {len(c.token_ids) for c in groups[requests[3]].completions} == {12}
    assert min(len(c.token_ids) for c in groups[requests[4]].completions) >= 9


@pytest.mark.parametrize("kind", ["qwen2", "sliding"])
def test_cancelled_requests_are_dropped(engines: dict[str, TransformersEngine], kind: str) -> None:
    """While they wait for room, and while they run; the others are as they would be alone."""
    engine = engines[kind]
    sampling = SamplingParams(max_new_tokens=40, ignore_eos=True)
    requests = [GenerationRequest(ids, sampling, seed=i, num_completions=2) for i, ids in enumerate(PROMPTS)]
    short = GenerationRequest([5], SamplingParams(max_new_tokens=3, ignore_eos=True), seed=9, num_completions=2)
    engine.add([*requests, short])
    engine.abort([requests[0]])
    got = {}
    while len(got) < 4:
        for group in engine.step():
            got[group.request] = [c.token_ids for c in group.completions]
            if group.request is short:
                engine.abort([requests[3]])
    assert set(got) == {requests[1], requests[2], requests[4], short}
    for request, tokens in got.items():
        assert tokens == completions_of(engine, request)


def test_fire_heats_the_first_token_alone(engines: dict[str, TransformersEngine]) -> None:
    """Log-probs are those of softmax(logits / 5) at token 1 and softmax(logits / 0.7) at token 2, top-k 8 in both."""
    engine = engines["qwen2"]
    sampling = SamplingParams(max_new_tokens=2, temperature=0.7, fire_temperature=5.0, top_k=8, ignore_eos=True)
    (group,) = run(engine, [[5, 6]], sampling, g=200)
    for c in group.completions:
        with torch.no_grad():
            logits = engine._model(torch.tensor([[5, 6, c.token_ids[0]]])).logits[0, 1:]
        for t, temperature in enumerate((5.0, 0.7)):
            best = logits[t].topk(8)
            at = best.indices.tolist().index(c.token_ids[t])
            expected = (best.values / temperature).log_softmax(-1)[at].item()
            assert c.logprobs[t] == pytest.approx(expected, abs=5e-5)
    assert len({c.token_ids[0] for c in group.completions}) == 8
    cold = SamplingParams(max_new_tokens=1, temperature=0.0, fire_temperature=5.0)
    assert tokens_of(run(engine, [[5, 6]], cold, g=1)) == [
        [[engine._model(torch.tensor([[5, 6]])).logits[0, -1].argmax().item()]]
    ]


def test_fire_with_min_p_by_hand() -> None:
    """Probabilities 0.6, 0.3, 0.1: min-p 0.2 drops the last, and at temperature 2 the others are as sqrt(2) to 1."""
    logits = torch.tensor([[0.6, 0.3, 0.1]]).log()
    sampling = SamplingParams(min_p=0.2, fire_temperature=2.0)
    p = distribution(logits, sampling, first=True)[0]
    assert (p / p.sum()).tolist() == pytest.approx([2**0.5 / (1 + 2**0.5), 1 / (1 + 2**0.5), 0])
    assert distribution(logits, sampling)[0, :2].tolist() == pytest.approx([0.6, 0.3])


def test_the_fast_decoder_has_a_switch(folders: dict[str, str]) -> None:
    fast, plain = start(folders["qwen2"], cpu_kernels=True), start(folders["qwen2"], cpu_kernels=False)
    assert fast._cpu_model is not None and plain._cpu_model is None
    sampling = SamplingParams(max_new_tokens=12)
    assert tokens_of(run(fast, PROMPTS, sampling)) == tokens_of(run(plain, PROMPTS, sampling))


def test_lean_decoder_serves_plain_models(engines: dict[str, TransformersEngine]) -> None:
    assert {kind: engine._cpu_model is not None for kind, engine in engines.items()} == {
        "qwen2": True, "llama": True, "qwen3": True, "sliding": False
    }  # fmt: skip


@pytest.mark.parametrize("sampling", [SamplingParams(), SamplingParams(top_p=0.9, repetition_penalty=1.3)])
def test_samples_do_not_depend_on_the_rows_computed_together(
    monkeypatch: pytest.MonkeyPatch, sampling: SamplingParams
) -> None:
    logits, u = torch.randn(7, 50), torch.rand(7, dtype=torch.float64)
    seen, forbidden = torch.rand(7, 50) < 0.3, torch.rand(7, 50) < 0.3
    found = []
    for elements in (1, 100, 1 << 20):  # one row, two, and all of them
        monkeypatch.setattr("lightrl.engines.transformers.sampling._CPU_ELEMENTS", elements)
        found.append(sample(logits, sampling, u, seen=seen, forbidden=forbidden))
    for tokens, logprobs, kept in found[1:]:
        assert torch.equal(tokens, found[0][0]) and torch.equal(logprobs, found[0][1])
        assert (kept is None) == (found[0][2] is None)
        assert all(map(torch.equal, kept or [], found[0][2] or []))


def test_rows_of_different_ages_end_at_the_limit(
    engines: dict[str, TransformersEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where nothing but the limit ends a row, tokens are written down when the oldest row reaches it."""
    sampling = SamplingParams(max_new_tokens=20, stop_token_ids=[30], ignore_eos=True)
    free = SamplingParams(max_new_tokens=20, ignore_eos=True)
    whole = {name: run(engines["qwen2"], PROMPTS, s, g=2) for name, s in (("stop", sampling), ("free", free))}
    monkeypatch.setattr(engines["qwen2"], "max_sequences", 5)
    assert len({len(c.token_ids) for group in whole["stop"] for c in group.completions}) > 2
    for name, s in (("stop", sampling), ("free", free)):
        few = run(engines["qwen2"], PROMPTS, s, g=2)
        assert tokens_of(few) == tokens_of(whole[name])
        for group in few:
            for c in group.completions:
                assert len(c.logprobs) == len(c.token_ids)
                assert c.finish_reason == ("stop" if name == "stop" and 30 in c.token_ids else "length")
