"""`lightrl completion SHELL`: what makes the shell complete commands, options and configurations."""

from __future__ import annotations

import inspect
from importlib import import_module
from typing import Literal, get_args, get_origin, get_type_hints

__all__ = ["completion"]

SCRIPT = """\
_lightrl_values() {{
    case "$1 $2" in
{values}
    esac
}}
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
    elif words="$(_lightrl_values "${{given[1]}}" "$last")" && [[ -n "$words" ]]; then
        :
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
    """Prints a script that completes commands, options, their choices, files and the names of `lightrl recipes`.

    For bash: `lightrl completion bash > ~/.local/share/bash-completion/completions/lightrl`, then a new shell.
    For zsh: `lightrl completion zsh >> ~/.zshrc`.

    Args:
        shell: bash or zsh.
    """
    from lightning.pytorch import Trainer

    import lightrl.algorithms
    from lightrl.cli import COMMANDS, RUNS
    from lightrl.config_files import PREFIX, shipped_configs

    run = ["config", "run_dir", "ckpt_path", "print_config", "seed_everything", "model", "model.help", "data"]
    run += ["data.help", "verbose", "help"]
    run += [f"trainer.{name}" for name in inspect.signature(Trainer).parameters]
    options = {"|".join(RUNS): run}
    modules = [name for name in lightrl.algorithms.__all__ if name.endswith("LightningModule")]
    choices = {f"{run} --model": modules for run in RUNS}
    choices |= {f"{run} --data": [n for n in lightrl.__all__ if n.endswith("DataModule")] for run in RUNS}
    for command, place in COMMANDS.items():
        module, _, function = place.partition(":")
        called = getattr(import_module(module), function)
        hints, parameters = get_type_hints(called), inspect.signature(called).parameters
        options[command] = [name.replace("_", "-") for name in (*parameters, "help")]
        for name, parameter in parameters.items():
            words = [str(word) for word in get_args(hints[name])] if get_origin(hints[name]) is Literal else []
            option = parameter.default is not parameter.empty
            if words:  # what a command needs stands behind its name, without an option
                choices[f"{command} --{name.replace('_', '-')}" if option else f"{command} {command}"] = words
    cases = [f'            {command}) words="{" ".join(f"--{o}" for o in of)}" ;;' for command, of in options.items()]
    values = [f'        "{place}") echo "{" ".join(words)}" ;;' for place, words in choices.items()]
    configs = " ".join(f"{PREFIX}{name}" for name in shipped_configs())
    script = SCRIPT.format(
        commands=" ".join((*RUNS, *COMMANDS)), configs=configs, cases="\n".join(cases), values="\n".join(values)
    )
    before = "autoload -U +X bashcompinit && bashcompinit\n" if shell == "zsh" else ""
    print(f"{before}{script}", end="")
