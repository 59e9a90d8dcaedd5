"""Shell completion: a script with every command, its options and the values that these take.

The script holds them all, so completing starts no Python. zsh reads that of bash. Where nothing of ours fits, the shell
completes names of files.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

import tyro
from pydantic import BaseModel

from lagrpo.objective.recipes import PRESETS
from lagrpo.settings.arguments import SHORT
from lagrpo.settings.plan import PlanSettings
from lagrpo.settings.schema import EvalSettings, Settings
from lagrpo.settings.serve import ServeSettings
from lagrpo.settings.toml import list_settings
from lagrpo.tasks import task_options

Options = Mapping[str, tuple[str, ...]]
"""Each option of a command, and the values that it takes where these are few. Under "": what stands without one."""

BASH = """\
_lagrpo() {{
    local current="${{COMP_WORDS[COMP_CWORD]}}" before="${{COMP_WORDS[COMP_CWORD-1]}}" words=""
    if [ "$COMP_CWORD" -eq 1 ]; then
        words="{commands}"
    else
        case "${{COMP_WORDS[1]}} $before" in
{values}
        esac
        if [ -z "$words" ]; then
            case "${{COMP_WORDS[1]}} $current" in
{options}
            esac
        fi
    fi
    COMPREPLY=($(compgen -W "$words" -- "$current"))
}}
complete -o bashdefault -o default -F _lagrpo lagrpo
"""
ZSH = "autoload -U +X compinit && compinit\nautoload -U +X bashcompinit && bashcompinit\n"


def script(
    shell: Literal["bash", "zsh", "fish"], functions: Mapping[str, Callable[..., Any]], commands: Iterable[str]
) -> str:
    """The script for a shell. `functions`: the commands whose signature says what they take."""
    settings = of_settings(Settings, {"--help", "--dry-run"})
    options = {name: of_signature(function) for name, function in functions.items()}
    options |= {"train": settings, "demo": settings, "eval": of_settings(EvalSettings, {"--help"})}
    options |= {"serve": of_signature(ServeSettings), "plan": {**settings, **of_settings(PlanSettings, {"--json"})}}
    return write(shell, {name: options[name] for name in commands})


def of_settings(kind: type[BaseModel], flags: Iterable[str]) -> Options:
    """The options of a command that takes settings."""
    names = {"task.name": tuple(task_options()), "objective.recipe": tuple(PRESETS), "model.path": ("smollm2",)}
    fields = {name: field.annotation for name, field in list_settings(kind).items()}
    own = {
        f"--{name}": names.get(name) or values_of(annotation)
        for name, annotation in fields.items()
        if not (isinstance(annotation, type) and issubclass(annotation, BaseModel))
    }
    short = {f"--{word}": own[f"--{name}"] for word, name in SHORT.items() if f"--{name}" in own}
    return {**dict.fromkeys(sorted(flags), ()), **short, **own}


def of_signature(function: Callable[..., Any]) -> Options:
    """The options of a command that is a function or a dataclass, as tyro makes them."""
    hints = get_type_hints(function.__init__ if inspect.isclass(function) else function, include_extras=True)
    found: dict[str, tuple[str, ...]] = {"--help": ()}
    for parameter in inspect.signature(function).parameters:
        hint = hints[parameter]
        extras = get_args(hint)[1:] if get_origin(hint) is Annotated else ()
        if tyro.conf.Positional in extras:
            found[""] = tuple(PRESETS) if function.__name__ == "recipes" else values_of(hint)
            continue
        given = next((name for extra in extras if (name := getattr(extra, "name", None))), parameter)
        found[f"--{given.replace('_', '-')}"] = () if bool in (hint, *get_args(hint)) else values_of(hint)
    return found


def values_of(annotation: Any) -> tuple[str, ...]:
    """The values that an annotation names; none where others are possible, too.

    >>> values_of(Literal["a", "b"] | None), values_of(int), values_of(bool)
    (('a', 'b'), (), ('true', 'false'))
    """
    if annotation is bool:
        return "true", "false"
    if get_origin(annotation) is Literal:
        return tuple(map(str, get_args(annotation)))
    return tuple(value for part in get_args(annotation) for value in values_of(part))


def write(shell: Literal["bash", "zsh", "fish"], commands: Mapping[str, Options]) -> str:
    """The script for a shell."""
    if shell == "fish":
        return "\n".join(_fish(commands)) + "\n"
    values = [
        f'            "{command} {option}") words="{" ".join(values)}" ;;'
        for command, options in commands.items()
        for option, values in options.items()
        if values and option
    ]
    offered = [
        f'                "{command} {start}"*) words="{" ".join(words)}" ;;'
        for command, options in commands.items()
        for start, words in (("-", [name for name in options if name]), ("", options.get("", ())))
        if words
    ]
    bash = BASH.format(commands=" ".join(commands), values="\n".join(values), options="\n".join(offered))
    return bash if shell == "bash" else ZSH + bash


def _fish(commands: Mapping[str, Options]) -> Iterable[str]:
    yield f'complete -c lagrpo -n __fish_use_subcommand -f -a "{" ".join(commands)}"'
    for command, options in commands.items():
        only = f'complete -c lagrpo -n "__fish_seen_subcommand_from {command}"'
        for option, values in options.items():
            offered = f' -x -a "{" ".join(values)}"' if values else ""
            yield f"{only} -l {option.removeprefix('--')}{offered}" if option else f"{only}{offered}"
