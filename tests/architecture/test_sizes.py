"""What fits a reader's head: sizes, no state at module level, no unowned notes."""

import ast
from collections.abc import Iterator

import pytest

MAX_MODULE_LINES = 400
MAX_FUNCTION_LINES = 60
MAX_KERNEL_LINES = 100
MAX_PARAMETERS = 8
EXEMPT_NAMES = {"utils", "helpers", "common", "misc"}
MUTATORS = {
    "append", "extend", "insert", "add", "update", "setdefault", "pop", "popitem", "remove", "discard", "clear",
}  # fmt: skip
Function = ast.FunctionDef | ast.AsyncFunctionDef


def functions(tree: ast.AST) -> Iterator[Function]:
    return (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))


def parameters(function: Function) -> list[str]:
    arguments = function.args
    named = [a.arg for a in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)]
    return [name for name in named if name not in {"self", "cls"}]


def is_kernel(function: Function) -> bool:
    """Whether it is compiled for a GPU: such a function cannot be cut at will, and keeps a limit of its own."""
    compiled = any("triton.jit" in ast.unparse(decorator) for decorator in function.decorator_list)
    return compiled and function.end_lineno - function.lineno < MAX_KERNEL_LINES


def test_modules_are_short(modules):
    long = {m.name: m.text.count("\n") for m in modules if m.text.count("\n") > MAX_MODULE_LINES}
    assert not long


def test_functions_are_short(modules):
    counted = ((m, f) for m in modules for f in functions(m.tree) if not is_kernel(f))
    sizes = {f"{m.name}:{f.name}": f.end_lineno - f.lineno + 1 for m, f in counted}
    assert not {name: size for name, size in sizes.items() if size > MAX_FUNCTION_LINES}


def test_functions_take_few_parameters(modules):
    own = [
        m for m in modules if not m.name.startswith("aserve_kernels/")
    ]  # an operation has as many as it has operands
    counts = {f"{m.name}:{f.name}": len(parameters(f)) for m in own for f in functions(m.tree)}
    assert not {name: count for name, count in counts.items() if count > MAX_PARAMETERS}


def test_modules_say_what_they_own(modules):
    assert not [m.name for m in modules if m.text and not ast.get_docstring(m.tree)]


def test_names_mean_something(modules):
    assert not [m.name for m in modules if m.path.stem in EXEMPT_NAMES]


def test_no_global_statement(modules):
    assert not [f"{m.name}:{node.lineno}" for m in modules for node in ast.walk(m.tree) if isinstance(node, ast.Global)]


def test_module_level_containers_are_constants(modules):
    changed = [change for module in modules for change in changes_of_module_state(module)]
    assert not changed


def changes_of_module_state(module) -> Iterator[str]:
    """Places inside functions that change a container made at module level."""
    containers = set()
    for node in module.tree.body:
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        value = getattr(node, "value", None)
        if isinstance(value, ast.List | ast.Dict | ast.Set | ast.ListComp | ast.DictComp | ast.SetComp | ast.Call):
            containers |= {target.id for target in targets if isinstance(target, ast.Name)}
    for function in functions(module.tree):
        for node in ast.walk(function):
            changed = None
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in MUTATORS:
                changed = node.func.value
            elif isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store | ast.Del):
                changed = node.value
            if isinstance(changed, ast.Name) and changed.id in containers - local_names(function):
                yield f"{module.name}:{node.lineno} changes {changed.id}"


def local_names(function: Function) -> set[str]:
    stored = {n.id for n in ast.walk(function) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
    return stored | set(parameters(function))


@pytest.mark.parametrize("word", ["TODO", "FIXME", "XXX", "HACK"])
def test_no_unowned_notes(modules, word):
    assert not [m.name for m in modules if word in m.text]
