"""Every YAML under configs/ goes through the real command line.

Whole configurations are run (`fast_dev_run`). One more --config replaces their model, rows, and engine with a tiny
model, local rows, and the transformers engine. Overlays are merged into a recipe.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from lightrl.cli import run
from lightrl.cli.config_files import expand_configs
from lightrl.models.packing.streams import make_stream
from tests.toys import quickstart_model

CONFIGS = Path(__file__).resolve().parent.parent / "configs"
BASES = sorted(
    p
    for p in CONFIGS.rglob("*.yaml")
    if "\nrun_dir: " not in p.read_text() and p.parent.name not in ("overlays", "strategies")
)
WHOLE = sorted(
    p
    for d in ("quickstart", "recipes", "algorithms", "distillation")
    for p in (CONFIGS / d).glob("*.yaml")
    if p not in BASES
)
# They differ from others in a size, or in parts that run in tests of their own, and are only parsed.
SPARED = "2.5_1.5b|vl_7b|few_shot|rloo_in|drgrpo|clevr|cispo|cpgd|gspo|plus_plus|top_p"
NEIGHBORS = [config for config in WHOLE if re.search(SPARED, config.stem)]
OVERLAYS = sorted(p for folder in ("overlays", "strategies") for p in (CONFIGS / folder).glob("*.yaml"))
PPO_RECIPE = CONFIGS / "recipes" / "ppo_gsm8k_qwen2.5_1.5b.yaml"
EXPERTS = {"granite_3.1_1b_a400m": "GraniteMoe", "olmoe_1b_7b": "Olmoe"}  # recipes for mixtures of experts
# A chat template in the characters that the quickstart's tokenizer knows.
TEMPLATE = "{% for m in messages %}{{ m.content }}\n{% endfor %}"


def name(path: Path) -> str:
    return f"{path.parent.name}/{path.stem}"


@pytest.fixture(autouse=True)
def _in_scratch_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["lightrl"])  # LightningCLI warns about arguments beside `args`


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tiny model, rows like GSM8K's, and the configurations that put them in place."""
    folder = tmp_path_factory.mktemp("tiny")
    model = quickstart_model(folder / "model", max_position_embeddings=1024)
    settings = json.loads((folder / "model" / "tokenizer_config.json").read_text())
    (folder / "model" / "tokenizer_config.json").write_text(json.dumps({**settings, "chat_template": TEMPLATE}))
    rows = [
        {"question": f"{a}+{a}=", "problem": f"{a}+{a}=", "prompt": f"{a}+{a}=", "answer": f"{a} and {a}\n#### {2 * a}"}
        for a in range(8)
    ]
    made = json.dumps({"name": "chain_sum", "settings": {}, "seed": 0, "size": 8, "index": 0})
    more = [{"completion": row["answer"][-2:], "gym": made} for row in rows]
    (folder / "rows.jsonl").write_text("\n".join(json.dumps(row | m) for row, m in zip(rows, more, strict=True)))
    source = {"path": str(folder / "rows.jsonl"), "rows": None, "name": None}
    trainer = {"accelerator": "cpu", "devices": 1, "precision": "32-true", "fast_dev_run": 1}
    trainer |= {"enable_progress_bar": False}
    actor = {"path": model, "random_init": False, "freeze": []}
    rl = {
        "trainer": trainer,
        "model": {"init_args": {"actor": actor, "updates": {"minibatch_size": None}}},
        "data": {
            "init_args": {
                "prompts": source,
                "engine": {"class_path": "TransformersEngine"},
                "sampling": {"max_new_tokens": 4},
                "evaluation": {"prompts": source, "sampling": {"max_new_tokens": 4}, "batch_size": 4},
                "prompts_per_rollout": 4,
            }
        },
    }
    sft_data = {"tokenizer": model, "train": source, "val": source, "batch_size": 4}
    sft = {"trainer": trainer, "model": {"init_args": {"actor": actor}}, "data": {"init_args": sft_data}}
    (folder / "rl.yaml").write_text(yaml.safe_dump(rl))
    (folder / "sft.yaml").write_text(yaml.safe_dump(sft))
    reference = {"path": model, "dtype": None}
    (folder / "reference.yaml").write_text(yaml.safe_dump({"model": {"init_args": {"reference": reference}}}))
    curriculum = {"class_path": "lightrl.data.PromptCurriculum", "init_args": {"source": source, "replay": 0.5}}
    of_curriculum = {**rl["data"]["init_args"], "prompts": curriculum}
    (folder / "curriculum.yaml").write_text(yaml.safe_dump({**rl, "data": {"init_args": of_curriculum}}))
    for family in EXPERTS.values():
        config = {"num_local_experts": 4, "num_experts": 4, "num_experts_per_tok": 2}
        mixture = quickstart_model(folder / family, family=family, **config)
        shutil.copy(folder / "model" / "tokenizer_config.json", mixture)
        own = {"model": {"init_args": {"actor": {"path": mixture}}}}
        (folder / f"{family}.yaml").write_text(yaml.safe_dump(own))
    beside = {**rl["data"]["init_args"], "engine": {"class_path": "tests.toys.ThreadEngine"}}
    (folder / "in_flight.yaml").write_text(yaml.safe_dump({**rl, "data": {"init_args": beside}}))
    teachers = {"grpo": {"path": model}}
    (folder / "teachers.yaml").write_text(yaml.safe_dump({"model": {"init_args": {"teachers": teachers}}}))
    return folder


@pytest.fixture(scope="module")
def served(place: Path) -> Iterator[Path]:
    """A configuration that puts a small server with the tiny model in place of a served teacher."""
    pytest.importorskip("uvicorn")
    from tests.engines.sglang_server import SGLangServer

    server = SGLangServer(place / "model")
    teacher = {"class_path": "lightrl.engines.ServerTeacher", "init_args": {"urls": [server.start()], "kind": "sglang"}}
    (place / "served.yaml").write_text(yaml.safe_dump({"model": {"init_args": {"teachers": {"grpo": teacher}}}}))
    yield place / "served.yaml"
    server.stop()


def printed(capsys: pytest.CaptureFixture[str], *arguments: object) -> dict[str, Any]:
    """What `lightrl fit ... --print_config` prints."""
    capsys.readouterr()
    with pytest.raises(SystemExit) as stop:
        run(["fit", *map(str, arguments), "--print_config"])
    out = capsys.readouterr()
    assert not stop.value.code, out.err
    config: dict[str, Any] = yaml.safe_load(out.out)
    return config


def test_every_yaml_is_covered() -> None:
    assert {*WHOLE, *OVERLAYS, *BASES} == set(CONFIGS.rglob("*.yaml"))
    text = {f"{algorithm}_gsm8k_qwen2.5_{size}" for algorithm in ("ppo", "grpo") for size in ("0.5b", "1.5b")}
    vision = {f"grpo_{task}_qwen2.5_vl_{size}" for task in ("geo3k", "clevr_count") for size in ("3b", "7b")}
    experts = {f"grpo_gsm8k_{name}" for name in EXPERTS}
    trees = {"grpo_gsm8k_few_shot_qwen2.5_0.5b", "ppo_gsm8k_few_shot_qwen2.5_1.5b"}
    assert {p.stem for p in WHOLE if p.parent.name == "recipes"} == text | vision | experts | trees
    for config in (*WHOLE, *OVERLAYS):
        assert f"--config configs/{config.parent.name}/{config.name}" in config.read_text()
        if config in WHOLE:  # all that the run writes goes to a folder of its own
            assert Path(yaml.safe_load(config.read_text())["run_dir"]).name == config.stem


RUN = [pytest.param(config, marks=pytest.mark.long) if config in NEIGHBORS else config for config in WHOLE]


@pytest.mark.parametrize("config", RUN, ids=name)
def test_runs_with_a_tiny_model(
    config: Path, place: Path, served: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """One rollout and one evaluation; nothing is written, so a trial cannot damage the files of a real run."""
    if "geo3k" in config.stem:
        pytest.importorskip("math_verify")
    if "smollm2" in config.stem:
        pytest.importorskip("reasoning_gym")
    own = [name for name in ("sft", "curriculum", "in_flight") if config.stem.endswith(name)]
    tiny = own[0] if own else "rl"
    files = [config, place / f"{tiny}.yaml"]
    if "reference:" in config.read_text():
        files.append(place / "reference.yaml")
    if "ServerTeacher" in config.read_text():
        files.append(served)
    elif "teachers:" in config.read_text():
        files.append(place / "teachers.yaml")
    family = EXPERTS.get(config.stem.removeprefix("grpo_gsm8k_"))
    if family is not None:
        files.append(place / f"{family}.yaml")
    cli = run(["fit", *(f"--config={file}" for file in files)])
    metrics = cli.trainer.callback_metrics
    if family is not None:
        assert cli.model.actor.has_experts and "Routing replay is off" not in caplog.text
        assert ("loss/aux" in metrics) == (cli.model.extra_losses.aux_loss_coef > 0)
    if config.stem == "sft":
        assert metrics["loss/sft"] > 0 and metrics["eval/loss"] > 0
    else:
        assert metrics["reward/scored_fraction"] == 1.0
        own_reward = {"geo3k": "MathVerify", "smollm2": "ReasoningGymReward"}
        reward = next((name for part, name in own_reward.items() if part in config.stem), "ExactAnswer")
        assert f"eval/reward/{reward}" in metrics
        assert ("kl/ref" in metrics) == (cli.model.kl is not None)
        assert metrics.get("kl/ref", 0.0) == pytest.approx(0.0, abs=1e-4)  # the first rollout is the reference's own
        assert cli.trainer.global_step == cli.model.ppo_epochs
        if config.stem in ("grpo_top_p", "rloo_min_p"):  # engine and trainer normalise over what was left
            sampling = cli.datamodule.sampling
            assert (sampling.top_p, sampling.top_k) in [(0.95, 0), (1.0, 8)] and metrics["kl/engine_gap"] < 1e-5
    assert list(tmp_path.iterdir()) == []


def test_recipes_of_trees_run_their_examples_once(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The rows of a micro-batch begin with the same examples; what else they have is short."""
    seen: list[tuple[int, int]] = []

    def counted(token_ids: Any, attention_mask: Any, *masks: Any, **settings: Any) -> Any:
        stream = make_stream(token_ids, attention_mask, *masks, **settings)
        if len(token_ids) >= 4:  # not the canary's
            seen.append((stream.num_tokens, int(attention_mask.sum())))
        return stream

    monkeypatch.setattr("lightrl.models.policy.make_stream", counted)
    for recipe in ("grpo_gsm8k_few_shot_qwen2.5_0.5b", "ppo_gsm8k_few_shot_qwen2.5_1.5b"):
        seen.clear()
        files = [CONFIGS / "recipes" / f"{recipe}.yaml", place / "rl.yaml", place / "reference.yaml"]
        run(["fit", *(f"--config={file}" for file in files)])
        assert seen and all(tokens < whole / 3 for tokens, whole in seen), recipe


@pytest.fixture(scope="module")
def parser(place: Path) -> Any:
    return run([f"--config={CONFIGS / 'algorithms' / 'grpo.yaml'}", f"--config={place / 'rl.yaml'}"], run=False).parser


@pytest.mark.parametrize("config", [*NEIGHBORS, *OVERLAYS], ids=name)
def test_what_is_not_run_is_accepted_and_overlays_are_merged_into_a_recipe(config: Path, parser: Any) -> None:
    if config.stem.startswith("deepspeed"):
        pytest.importorskip("deepspeed")
    files = [PPO_RECIPE, config] if config in OVERLAYS else [config]
    merged = parser.parse_args(expand_configs([f"--config={file}" for file in files]))
    assert config in NEIGHBORS or merged.model.init_args.optimizer.init_args.weight_decay == 0.0


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ([], ["CSVLogger", "TensorBoardLogger"]),
        (["--trainer.logger=CSVLogger", "--trainer.logger.save_dir=x"], ["CSVLogger"]),
        (["--trainer.logger=false"], []),
    ],
    ids=["none given", "its own", "switched off"],
)
def test_a_run_folder_has_what_the_report_reads(given: list[str], expected: list[str], place: Path) -> None:
    files = [CONFIGS / "algorithms" / "grpo.yaml", place / "rl.yaml"]
    arguments = [*(f"--config={file}" for file in files), "--run_dir=here", "--trainer.fast_dev_run=false", *given]
    cli = run(arguments, run=False)
    assert [type(logger).__name__ for logger in cli.trainer.loggers] == expected
    if given == []:
        assert {Path(logger.log_dir) for logger in cli.trainer.loggers} == {
            Path("here").absolute(),
            Path("here/tensorboard").absolute(),
        }
    assert cli.trainer.default_root_dir.endswith("here")


def test_a_plain_list_replaces_and_a_plus_adds(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What the overlays' comments say about lists."""
    one = [{"class_path": "LinearKL", "init_args": {"start": 0.1, "end": 0.0, "num_rollouts": 9}}]
    for key, count in (("callbacks", 1), ("callbacks+", 7)):
        (tmp_path / "more.yaml").write_text(yaml.safe_dump({"trainer": {key: one}}))
        config = printed(capsys, "--config", PPO_RECIPE, "--config", tmp_path / "more.yaml")
        assert len(config["trainer"]["callbacks"]) == count
        assert config["trainer"]["callbacks"][-1]["class_path"].endswith("LinearKL")
