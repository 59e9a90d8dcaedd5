"""Digests of the code that decides what a run does, so that a resumed run can say what has changed.

`source_digest` reads one function; `collect_sources` lists a run's reward functions, environments,
tools, chat template, and losses and rollout engine of the user's own. environment.json keeps the
digests under `sources`.
"""

from __future__ import annotations

import ast
import importlib.util
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import lru_cache, partial
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import TYPE_CHECKING, Any, cast

from lagrpo.data.fingerprint import digest
from lagrpo.rewards.reward import Rewards, load_function
from lagrpo.rollout.episodes import MAIN_TASK
from lagrpo.settings.user_loss import own_functions
from lagrpo.tasks import Make, environment_of
from lagrpo.tasks.environments import Tools
from lagrpo.tasks.gym import Gym

if TYPE_CHECKING:
    from lagrpo.core.objective import Recipe
    from lagrpo.model.chat import Chat
    from lagrpo.training.build_tasks import TaskSetup

PLAIN = (str, bytes, int, float, complex, bool, type(None))
BLOCKS = (ast.If, ast.For, ast.With, ast.Try, ast.ExceptHandler)
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)


def source_digest(target: Callable[..., Any] | str) -> str | None:
    """The digest of the source of a function, class or callable object, or of a name of one.

    A name is "package.module:function".

    It covers the functions, classes and constants that the source uses, if they are not
    installed packages, and the values that a closure, a partial or an object holds. Comments, white
    space, other code of the module, and the module's name do not count. Code without a source
    counts by its bytecode, which other versions of Python may compile differently. None for
    functions that are written in C. Raises ValueError for a name that cannot be loaded.
    """
    function = load_function(target) if isinstance(target, str) else target
    source = _Source()
    source.add(function)
    return digest("\0".join(source.texts)) if source.texts else None


def collect_sources(
    chat: Chat,
    tasks: Mapping[str, TaskSetup],
    recipe: Recipe,
    engine: str | None = None,
) -> dict[str, str | None]:
    """The digest of everything that is code of a run's user: name -> digest.

    `engine` names the function that makes a rollout engine of the user's own.
    """
    template = chat.tokenizer.chat_template
    sources = {"chat template": digest(repr(template)) if template is not None else None}
    if engine is not None:
        sources["rollout engine"] = source_digest(engine)
    for function in own_functions(recipe):
        sources[f"loss {getattr(function, '__name__', type(function).__name__)}"] = source_digest(
            function
        )
    for set_name, setup in tasks.items():
        where = "" if set_name == MAIN_TASK else f"evaluation set {set_name}: "
        task, environment = setup.task, environment_of(setup.task)
        tools: Mapping[str, Callable[..., Any]] = {}
        if isinstance(environment, Tools):
            tools = environment.functions
        for name, function in tools.items():
            sources[f"{where}tool {name}"] = source_digest(function)
        if environment is None or tools:
            for reward in Rewards.from_reward(task.reward).parts:
                sources[f"{where}reward {reward.title}"] = source_digest(reward.function)
        else:
            sources[f"{where}environment"] = source_digest(find_own_environment(environment))
    return sources


def find_own_environment(make: Make) -> Make | str:
    """What makes environments; for the task gym:package.module:function that function's name."""
    if getattr(make, "func", None) is Gym:
        name: str = cast("partial[Gym]", make).args[0]
        if "-v" not in name:
            return name
    return make


def find_changed_sources(
    before: Mapping[str, str | None], now: Mapping[str, str | None]
) -> list[str]:
    """The names of what both have, with another digest."""
    return [name for name in now if name in before and before[name] != now[name]]


class _Source:
    """Collects the source of a callable and of what it uses, each once.

    `texts` has them in the order of their use.
    """

    def __init__(self) -> None:
        self.texts: list[str] = []
        self._seen = set[int | tuple[int, str]]()
        self._package: str | None = None  # the top-level package of the first function

    def add(self, value: object) -> None:
        """Adds a callable, or a value that one holds."""
        if isinstance(value, PLAIN):
            self.texts.append(repr(value))
        elif isinstance(value, list | tuple):
            for item in cast("Sequence[object]", value):
                self.add(item)
        elif isinstance(value, Mapping):
            table = cast("Mapping[object, object]", value)
            for key in sorted(table, key=repr):
                self.add((key, table[key]))
        elif isinstance(value, set | frozenset):
            self.texts += sorted(map(repr, cast("set[object]", value)))
        elif id(value) not in self._seen:
            self._seen.add(id(value))
            self._add_object(value)

    def _add_object(self, value: object) -> None:
        if isinstance(value, partial):
            bound = cast("partial[object]", value)
            self.add([bound.func, bound.args, bound.keywords])
        elif isinstance(value, MethodType):
            self.add([value.__func__, value.__self__])
        elif isinstance(value, FunctionType):
            self._add_function(value)
        elif hasattr(value, "__wrapped__"):  # such as what functools.lru_cache returns
            self.add(getattr(value, "__wrapped__", None))
        elif inspect.isclass(value):
            self._add_class(value)
        elif self._is_ours(type(value).__module__):
            self._add_class(type(value))
            self.add(getattr(value, "__dict__", {}))

    def _add_function(self, function: FunctionType) -> None:
        if not self._is_ours(function.__module__):
            return
        code = function.__code__
        nodes = find_function(code)
        self.texts += [ast.unparse(node) for node in nodes] or [describe_code(code)]
        cells = dict[str, Any]()
        for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
            with suppress(ValueError):  # it has no value yet
                cells[name] = cell.cell_contents
        self.add([cells, function.__defaults__, function.__kwdefaults__])
        for node in nodes:
            self._add_names(node, function.__globals__)

    def _add_class(self, kind: type) -> None:
        if not self._is_ours(kind.__module__):
            return
        if node := find_class(kind):
            self.texts.append(ast.unparse(node))
            self._add_names(node, vars(sys.modules[kind.__module__]))
        else:
            self.add([member for member in vars(kind).values() if inspect.isfunction(member)])

    def _add_names(self, node: ast.AST, namespace: dict[str, Any]) -> None:
        """Add the global names that a piece of source uses."""
        own = find_local_names(node)
        for used in ast.walk(node):
            if isinstance(used, ast.Name) and used.id in namespace.keys() - own:
                self._add_global(used.id, namespace)
            elif isinstance(used, ast.Attribute) and isinstance(used.value, ast.Name):
                module = namespace.get(used.value.id)
                if isinstance(module, ModuleType) and self._is_ours(module.__name__):
                    self._add_global(used.attr, vars(module))

    def _add_global(self, name: str, namespace: dict[str, Any]) -> None:
        """Adds a function or class, or the statements that give another name its value.

        The statement counts, not its value, which may differ between processes as the time does.
        """
        value = namespace.get(name)
        if isinstance(value, FunctionType) or inspect.isclass(value):
            return self.add(value)
        if isinstance(value, ModuleType) or (id(namespace), name) in self._seen:
            return
        self._seen.add((id(namespace), name))
        for statement in find_assignments(str(namespace.get("__name__")), name):
            if isinstance(statement, ast.ImportFrom):
                imported = {alias.asname or alias.name: alias.name for alias in statement.names}
                module = import_source(statement, namespace)
                if module is not None and self._is_ours(module.__name__):
                    self._add_global(imported[name], vars(module))
            else:
                self.texts.append(ast.unparse(statement))
                self._add_names(statement, namespace)

    def _is_ours(self, module: str | None) -> bool:
        """True if the code of a module counts.

        It does if it is in the first function's package, or not installed. lagrpo counts as
        installed, also in a checkout.
        """
        package = str(module).partition(".")[0]
        self._package = self._package or package
        if package == self._package:
            return True
        if package in sys.stdlib_module_names or package == "lagrpo":
            return False
        file = str(getattr(sys.modules.get(str(module)), "__file__", None) or "")
        return "site-packages" not in file and "dist-packages" not in file


# ---- in the text of a module ----


@lru_cache(maxsize=64)
def parse(text: str) -> ast.Module | None:
    """Returns the syntax tree of a text; None if it is not Python."""
    try:
        return ast.parse(text)
    except (SyntaxError, ValueError):
        return None


def read_tree(target: Any) -> tuple[ast.Module | None, int]:
    """The parsed file of a code object, class or module, and the line where the object begins."""
    try:
        lines, line = inspect.findsource(target)
    except (OSError, TypeError, IndexError):
        return None, 0
    return parse("".join(lines)), line + 1


def find_function(code: CodeType) -> list[ast.AST]:
    """The definitions that a code object may come from: one, or all lambdas of its line."""
    tree, _ = read_tree(code)
    definitions = list[ast.AST]()
    for node in ast.walk(tree) if tree else ():
        name = getattr(node, "name", "<lambda>")
        is_called_so = isinstance(node, FUNCTIONS) and name == code.co_name
        if is_called_so and first_line(node) == code.co_firstlineno:
            definitions.append(node)
    return definitions


def find_class(kind: type) -> ast.AST | None:
    """The definition of a class."""
    tree, line = read_tree(kind)
    for node in ast.walk(tree) if tree else ():
        is_called_so = isinstance(node, ast.ClassDef) and node.name == kind.__name__
        if is_called_so and first_line(node) == line:
            return node
    return None


def find_local_names(node: ast.AST) -> set[str]:
    """Parameters and variables of the functions in a piece of source."""
    bound_names, global_names = set[str](), set[str]()
    for part in ast.walk(node):
        if isinstance(part, ast.arg):
            bound_names.add(part.arg)
        elif isinstance(part, ast.Name) and isinstance(part.ctx, ast.Store):
            bound_names.add(part.id)
        elif isinstance(part, ast.Global):
            global_names.update(part.names)
    return bound_names - global_names


def first_line(node: Any) -> int:
    """The line on which a definition begins, with its decorators."""
    decorators = getattr(node, "decorator_list", ())
    return min([node.lineno, *(decorator.lineno for decorator in decorators)])


def find_assignments(module: str, name: str) -> Iterator[ast.stmt]:
    """The statements outside of functions and classes that give a global name its value."""
    tree, _ = read_tree(sys.modules[module]) if module in sys.modules else (None, 0)
    blocks: list[ast.AST] = [tree] if tree else []
    while blocks:
        for node in ast.iter_child_nodes(blocks.pop()):
            if isinstance(node, ast.ImportFrom):
                if name in [alias.asname or alias.name for alias in node.names]:
                    yield node
            elif isinstance(node, ast.Assign | ast.AnnAssign | ast.AugAssign):
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                names = [
                    n.id for target in targets for n in ast.walk(target) if isinstance(n, ast.Name)
                ]
                if name in names:
                    yield node
            elif isinstance(node, BLOCKS):
                blocks.append(node)


def import_source(statement: ast.ImportFrom, namespace: Mapping[str, Any]) -> ModuleType | None:
    """The loaded module that `from module import name` reads."""
    relative = "." * statement.level + (statement.module or "")
    package = namespace.get("__package__") or None
    try:
        return sys.modules.get(importlib.util.resolve_name(relative, package))
    except ImportError:
        return None


# ---- without a text ----


def describe_code(code: CodeType) -> str:
    """The bytecode of a function and its constants, without names of files and lines."""
    constants = [
        describe_code(constant) if isinstance(constant, CodeType) else describe_constant(constant)
        for constant in code.co_consts
    ]
    return repr((code.co_code, code.co_names, code.co_varnames, constants))


def describe_constant(constant: object) -> str:
    """A constant of a code object; sets are sorted: their order differs between processes."""
    if isinstance(constant, frozenset):
        return repr(sorted(map(repr, cast("frozenset[object]", constant))))
    return repr(constant)
