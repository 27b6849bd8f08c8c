"""`actor.chat_template`: Jinja as text or in a file, in prompts, environments, supervised rows and exports."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer

from lightrl.algorithms import GRPOLightningModule, SFTLightningModule
from lightrl.cli.export import export
from lightrl.data.sft import SFTDataModule, SFTSource
from lightrl.data.templates import load_tokenizer
from lightrl.environments.renderers import make_renderer
from lightrl.models.spec import ModelSpec
from tests.rollout.tasks import chat_model, fit, make_data, sgd, talk
from tests.toys import SMALL, quickstart_model, quiet_trainer, sums_data

TEMPLATE = "{% for m in messages %}{{ m['content'] }}{{ '=' if m['role'] == 'user' else '' }}{% endfor %}"


@pytest.fixture
def file(tmp_path: Path) -> str:
    (tmp_path / "mine.jinja").write_text(TEMPLATE)
    return str(tmp_path / "mine.jinja")


@pytest.fixture
def path(tmp_path: Path) -> str:
    return quickstart_model(tmp_path / "model", **SMALL)


def test_a_template_from_a_file_is_that_of_prompts_and_of_every_export(path: str, file: str, tmp_path: Path) -> None:
    """The quickstart's tokenizer has none: "1+2" becomes "1+2=" by the file, which is gone when the run is exported."""
    module = GRPOLightningModule(ModelSpec(path, chat_template=file), optimizer=sgd)
    data = sums_data(prompts=[{"prompt": [{"role": "user", "content": f"1+{a}"}]} for a in range(8)])
    trainer = quiet_trainer(limit_train_batches=1)
    trainer.fit(module, data)
    assert data._sets["prompts"].batch(0, 1).texts[0].endswith("=")
    trainer.save_checkpoint(tmp_path / "run.ckpt")
    module.save_pretrained(tmp_path / "saved")
    Path(file).unlink()
    export(str(tmp_path / "run.ckpt"), str(tmp_path / "exported"))
    for folder in ("saved", "exported"):
        assert AutoTokenizer.from_pretrained(tmp_path / folder).chat_template == TEMPLATE
    assert AutoTokenizer.from_pretrained(path).chat_template is None


@pytest.mark.parametrize("how", [{}, {"program": talk}])
def test_environments_and_programs_read_with_the_given_template(how: Any, tmp_path: Path) -> None:
    """The same rows and the same update as with a folder that holds the template."""
    own = chat_model(tmp_path / "own")
    template = AutoTokenizer.from_pretrained(own).chat_template
    bare = chat_model(tmp_path / "bare")
    tokenizer = AutoTokenizer.from_pretrained(bare)
    tokenizer.chat_template = None
    (tmp_path / "bare" / "chat_template.jinja").unlink(missing_ok=True)
    tokenizer.save_pretrained(bare)
    expected, kept = fit(own, **how)
    module = GRPOLightningModule(ModelSpec(bare, chat_template=template), kl=None, optimizer=sgd)
    _, found = fit(bare, module=module, **how)
    assert torch.equal(found.rollouts[0].token_ids, kept.rollouts[0].token_ids)
    for ours, theirs in zip(module.parameters(), expected.parameters(), strict=True):
        assert torch.equal(ours, theirs)


def test_supervised_rows_are_rendered_with_it(path: str, file: str) -> None:
    data = SFTDataModule(SFTSource(rows=[{"prompt": "1+2", "completion": "3"}] * 4), batch_size=4)
    quiet_trainer(callbacks=[]).fit(SFTLightningModule(ModelSpec(path, chat_template=file)), data)
    (batch,) = data.train_dataloader()
    assert data.tokenizer.decode(batch["token_ids"][0]).startswith("1+2=3")


def test_no_renderer_of_a_family_stands_in_for_a_given_template(tmp_path: Path) -> None:
    """`renderers` knows some models by their names, and writes their own templates."""
    path = chat_model(tmp_path / "model")
    assert load_tokenizer(path, chat_template=TEMPLATE).name_or_path == ""
    assert make_renderer(load_tokenizer(path, chat_template=TEMPLATE), None) is None
    module = GRPOLightningModule(ModelSpec(path, chat_template=TEMPLATE), kl=None, optimizer=sgd)
    with pytest.raises(ValueError, match="episode.renderer='qwen3': ignores actor.chat_template"):
        quiet_trainer().fit(module, make_data(episode={"renderer": "qwen3"}))
