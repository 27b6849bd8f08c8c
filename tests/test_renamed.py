"""Old names in a configuration are told their new names, all at once."""

import inspect
from pathlib import Path

import pytest
import yaml

from lightrl.cli.config_files import expand_configs
from lightrl.cli.renamed import CLASSES, KEYS, VALUES, require_new_names


def _nested(path: str, value: object) -> object:
    for part in reversed(path.split(".")):
        value = {part: value}
    return value


def test_every_old_name_of_a_configuration_and_of_the_command_line_is_named_at_once(tmp_path: Path) -> None:
    half = len(KEYS) // 2
    config: dict[str, dict[str, object]] = {"data": {}, "model": {}}
    for old in list(KEYS)[:half]:
        first, _, rest = old.partition(".")
        config.setdefault(first, {}).setdefault("init_args", {}).update(_nested(rest, 1))  # type: ignore[attr-defined]
    config["data"]["rewards"] = {key: old for key, old in VALUES}
    (tmp_path / "base.yaml").write_text(yaml.safe_dump(config))
    (tmp_path / "run.yaml").write_text(yaml.safe_dump({"base": "base.yaml", "trainer": {"callbacks": [*CLASSES]}}))
    given = [f"--{old.replace('.', '.init_args.', 1)}=1" for old in list(KEYS)[half:]]
    with pytest.raises(ValueError) as error:
        expand_configs(["fit", f"--config={tmp_path / 'run.yaml'}", *given])
    message = str(error.value)
    values = {f"data.rewards.{key}: {old}": new for (key, old), new in VALUES.items()}
    renamed = [*KEYS.items(), *CLASSES.items(), *values.items()]
    assert [old for old, new in renamed if f"{old}: renamed to {new}" not in message] == []


def test_no_argument_that_exists_is_rejected() -> None:
    from lightrl import algorithms, data, rollout

    found = []
    for package, base, key in ((algorithms, "LightningModule", "model"), (data, "LightningDataModule", "data")):
        for room in {package, rollout} if key == "data" else {package}:
            for name in room.__all__:
                if base in {cls.__name__ for cls in getattr(getattr(room, name), "__mro__", ())}:
                    arguments = inspect.signature(getattr(room, name)).parameters
                    found += [f"{name}.{each}" for each in arguments if f"{key}.{each}" in KEYS]
    assert found == []


def test_classes_and_values_of_others_are_left_alone() -> None:
    require_new_names({"trainer": {"callbacks": [{"class_path": new} for new in CLASSES.values()]}})
    require_new_names({"trainer": {"callbacks": [{"class_path": f"my_package.{old}"} for old in CLASSES]}})
    require_new_names({"data": {"split": "none"}})
