"""Packages re-export and do nothing else; ``__all__`` says the whole truth."""

import ast
import importlib

LAZY = {"aserve"}
"""Packages that load their names on first use (PEP 562), so that importing them costs nothing."""


def packages(modules):
    """Kernel sets are put together in the packages of their backends."""
    return [m for m in modules if m.path.name == "__init__.py" and m.name.startswith("aserve/")]


def test_packages_only_reexport(modules):
    for module in packages(modules):
        for node in module.tree.body:
            allowed: tuple[type[ast.AST], ...] = (ast.Import, ast.ImportFrom, ast.Assign, ast.Expr, ast.If)
            if module.dotted in LAZY:
                allowed += (ast.FunctionDef, ast.AnnAssign)
            assert isinstance(node, allowed), f"{module.name}:{node.lineno}"
            if isinstance(node, ast.Assign) and module.dotted not in LAZY:
                assert [t.id for t in node.targets if isinstance(t, ast.Name)] == ["__all__"], module.name


def test_all_is_complete(modules):
    for module in packages(modules):
        package = importlib.import_module(module.dotted)
        exported = getattr(package, "__all__", None)
        if exported is None:
            assert not imported_names(module.tree), f"{module.name} imports names and has no __all__"
            continue
        if module.dotted not in LAZY:
            assert set(exported) == imported_names(module.tree), module.name
        for name in exported:
            assert getattr(package, name) is not None


def imported_names(tree: ast.Module) -> set[str]:
    nodes = [node for node in tree.body if isinstance(node, ast.ImportFrom) and node.module != "__future__"]
    return {alias.asname or alias.name for node in nodes for alias in node.names}
