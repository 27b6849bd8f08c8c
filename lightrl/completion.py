"""`lightrl completion SHELL`: what makes the shell complete commands, options and configurations."""

from __future__ import annotations

import inspect
from importlib import import_module
from typing import Literal

__all__ = ["completion"]

SCRIPT = """\
_lightrl() {{
    local line="${{COMP_LINE:0:COMP_POINT}}"
    local cur="${{line##* }}" before="${{line%"${{line##* }}"}}" words
    local -a given=($before)
    local last="${{given[${{#given[@]}}-1]}}" prefix=""
    COMPREPLY=()
    if [[ "$cur" == --*=* ]]; then
        last="${{cur%%=*}}" prefix="${{cur%%=*}}=" cur="${{cur#*=}}"
    fi
    if [[ ${{#given[@]}} -le 1 ]]; then
        words="{commands} --help --version"
    elif [[ "$last" == --config || "$last" == -c ]]; then
        words="{configs}"
        COMPREPLY=($(compgen -f -X '!*.y*ml' -- "$cur") $(compgen -d -S / -- "$cur"))
    elif [[ "$cur" == -* ]]; then
        case "${{given[1]}}" in
{cases}
        esac
    else
        COMPREPLY=($(compgen -f -- "$cur"))
    fi
    COMPREPLY+=($(compgen -W "$words" -- "$cur"))
    # Readline takes what follows the last : or = for the word that is completed.
    local whole="$prefix$cur" i
    local done="${{whole%"${{whole##*[:=]}}"}}"
    done="${{done#"$prefix"}}"
    for i in "${{!COMPREPLY[@]}}"; do COMPREPLY[i]="${{COMPREPLY[i]#"$done"}}"; done
}}
complete -o nospace -F _lightrl lightrl
"""


def completion(shell: Literal["bash", "zsh"]) -> None:
    """Prints a script that completes commands, options, files and the names that `lightrl recipes` lists.

    For bash: `lightrl completion bash > ~/.local/share/bash-completion/completions/lightrl`, then a new shell.
    For zsh: `lightrl completion zsh >> ~/.zshrc`.

    Args:
        shell: bash or zsh.
    """
    from lightning.pytorch import Trainer

    from lightrl.cli import COMMANDS, RUNS
    from lightrl.config_files import PREFIX, shipped_configs

    run = ["config", "run_dir", "ckpt_path", "print_config", "seed_everything", "model", "model.help", "data"]
    run += ["data.help", "verbose", "help"]
    run += [f"trainer.{name}" for name in inspect.signature(Trainer).parameters]
    options = {"|".join(RUNS): run}
    for command, place in COMMANDS.items():
        module, _, function = place.partition(":")
        names = [*inspect.signature(getattr(import_module(module), function)).parameters, "help"]
        options[command] = [name.replace("_", "-") for name in names]
    cases = [f'            {command}) words="{" ".join(f"--{o}" for o in of)}" ;;' for command, of in options.items()]
    configs = " ".join(f"{PREFIX}{name}" for name in shipped_configs())
    script = SCRIPT.format(commands=" ".join((*RUNS, *COMMANDS)), configs=configs, cases="\n".join(cases))
    before = "autoload -U +X bashcompinit && bashcompinit\n" if shell == "zsh" else ""
    print(f"{before}{script}", end="")
