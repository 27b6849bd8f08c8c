"""Old names in a configuration file are told their new names."""

import pytest

from lightrl.cli.renamed import CLASSES, KEYS, VALUES, require_new_names


def _nested(path: str, value: object) -> object:
    for part in reversed(path.split(".")):
        value = {part: value}
    return value


@pytest.mark.parametrize(("old", "new"), KEYS.items())
def test_a_renamed_key_is_named(old: str, new: str) -> None:
    first, _, rest = old.partition(".")
    for config in (_nested(old, 1), {first: {"class_path": "x", "init_args": _nested(rest, 1)}}):
        with pytest.raises(ValueError, match=f"{old}: renamed to {new}"):
            require_new_names(config)


@pytest.mark.parametrize(("old", "new"), CLASSES.items())
def test_a_renamed_class_is_named(old: str, new: str) -> None:
    for path in (old, f"lightrl.callbacks.{old}"):
        with pytest.raises(ValueError, match=f"{path}: renamed to {new}"):
            require_new_names({"trainer": {"callbacks": [{"class_path": path}]}})
    require_new_names({"trainer": {"callbacks": [{"class_path": f"my_package.{old}"}]}})


def test_renamed_values_are_named_all_at_once() -> None:
    config = {"data": {key: old for key, old in VALUES}}
    with pytest.raises(ValueError) as error:
        require_new_names(config)
    assert all(f"{key}: {old}: renamed to {new}" in str(error.value) for (key, old), new in VALUES.items())
