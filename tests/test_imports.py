"""Imports go one way, from what is below to what is above."""

import ast
import pathlib
import subprocess
import sys

import pytest

import jax_nmsparse

PACKAGE = pathlib.Path(jax_nmsparse.__file__).parent

# Each level imports only levels before it; modules of one level do not import each other.
LEVELS = (
    ("pattern",),
    ("layout",),
    ("meshes", "compat"),
    ("explicit",),
    ("dense_form",),
    ("array",),
    ("reference", "native", "tuning", "kernels"),
    ("primitives", "dispatch", "sharding"),
    ("lowering",),
    ("ops",),
    ("pruning.selection", "quantization", "explanation", "aot", "collectives", "placement"),
    ("pruning.calibration", "pruning.permutation", "pruning.transposable"),
    ("pruning.wanda", "pruning.sparsegpt"),
    ("pruning.one_shot",),
    ("pruning",),
    ("description", "axes", "embedding", "tables", "files"),
    ("layer", "checkpoint", "planning", "sharded_checkpoint"),
    ("linen.variables", "nnx.variables"),
    ("linen.dense", "linen.general", "linen.embed", "nnx.linear", "nnx.general", "nnx.embed"),
    ("linen", "nnx"),
    ("conversion.report", "conversion.rules"),
    ("conversion.kernels",),
    ("conversion.trees", "conversion.modules"),
    ("conversion.convert",),
    ("conversion", "training"),
    ("commands.info", "commands.inspect", "commands.prune", "commands.bench", "commands.plan"),
    ("commands",),
    ("cli",),
    ("__init__",),
    ("__main__",),
)
_LEVEL = {module: level for level, modules in enumerate(LEVELS) for module in modules}


def _modules() -> dict[str, pathlib.Path]:
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" and len(parts) > 1 else parts)] = path
    return found


def _imports(node: ast.AST) -> set[str]:
    """Modules of the package that a node imports, without the package's name."""
    names = set()
    for child in ast.walk(node):
        if isinstance(child, ast.ImportFrom) and (child.module or "").split(".")[0] == "jax_nmsparse":
            assert child.level == 0, "relative import"
            inside = (child.module or "").removeprefix("jax_nmsparse").lstrip(".")
            names |= {inside} if inside else {alias.name for alias in child.names}
        elif isinstance(child, ast.Import):
            names |= {a.name.removeprefix("jax_nmsparse.") for a in child.names if a.name.startswith("jax_nmsparse.")}
    return names


def _deferred(tree: ast.Module) -> dict[str, set[str]]:
    """Function -> modules of the package that it imports when it runs."""
    functions = [n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef)]
    return {f.name: _imports(f) for f in functions if _imports(f)}


@pytest.mark.parametrize("module", _modules())
def test_imports_point_downwards(module):
    tree = ast.parse(_modules()[module].read_text(encoding="utf-8"))
    assert module in _LEVEL, f"{module} has no level; add it to LEVELS"
    deferred = set().union(*_deferred(tree).values()) if module == "array" else set()
    for imported in _imports(tree) - deferred:
        assert imported in _LEVEL, f"{module} imports {imported}, which has no level"
        assert _LEVEL[imported] < _LEVEL[module], f"{module} imports {imported}, which does not lie below it"


def test_the_one_deferred_import():
    """`x @ w` is defined above the array."""
    tree = ast.parse((PACKAGE / "array.py").read_text(encoding="utf-8"))
    assert _deferred(tree) == {"__rmatmul__": {"ops"}}


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("__init__.py")), ids=lambda p: p.parent.name)
def test_init_re_exports_and_does_nothing_else(path):
    body = ast.parse(path.read_text(encoding="utf-8")).body
    assert isinstance(body[0], ast.Expr), "a docstring first"
    for node in body[1:]:
        assert isinstance(node, ast.ImportFrom), ast.unparse(node)
        for alias in node.names:
            assert alias.asname == alias.name, f"{alias.name} is not re-exported as itself"


def test_public_names():
    """The names of the documented interface."""
    functions = ("explain", "grad", "prune", "quantize", "sddmm", "spmm", "spmv", "supports", "value_and_grad")
    for name in ("NMPattern", "NMSparse", *functions):
        assert callable(getattr(jax_nmsparse, name)), name


@pytest.mark.parametrize(
    "module", ["jax_nmsparse.pattern", "jax_nmsparse.layout", "jax_nmsparse.ops", "jax_nmsparse.quantization"]
)
def test_any_module_may_be_imported_first(module):
    """In a fresh process, with the first product right after it."""
    code = (
        f"import {module}\nimport jax.numpy as jnp, jax_nmsparse as nms\n"
        "print(float((jnp.ones(4) @ nms.prune(jnp.ones((4, 1)), '2:4'))[0]))"
    )
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "2.0"


def test_files_stay_short():
    for path in [*PACKAGE.rglob("*.py"), *pathlib.Path(__file__).parent.glob("*.py")]:
        assert len(path.read_text(encoding="utf-8").splitlines()) <= 460, f"{path} is long; split it"
