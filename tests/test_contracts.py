"""The contracts of the tree: who imports what, how large things are, what an import and an install may do, what the wheel ships.

The layers themselves stand in pyproject.toml (import-linter); here they are run, and what that tool can't see is read off the
source.
"""

import ast
import re
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
CODE = sorted(path for folder in ("remat_kit", "models", "train", "examples") for path in (ROOT / folder).rglob("*.py"))
PACKAGE = [path for path in CODE if path.is_relative_to(ROOT / "remat_kit")]

MAX_BODY_LINES = 40
MAX_FILE_LINES = 350


def run(*command: str) -> str:
    done = subprocess.run([sys.executable, *command], cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def imported(tree: ast.AST) -> Iterator[str]:
    """Dotted names that a module imports; `from a import b` gives `a.b`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{'.' * node.level}{node.module or ''}.{alias.name}" for alias in node.names)


def body_lines(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Lines from the first statement behind the docstring to the last one."""
    body = function.body[1:] if ast.get_docstring(function) else function.body
    return function.end_lineno - body[0].lineno + 1 if body and function.end_lineno else 0


def names(paths: list[Path]) -> list[str]:
    return [str(path.relative_to(ROOT)) for path in paths]


def test_import_contracts_hold():
    code = "import sys; from importlinter.cli import lint_imports; sys.exit(lint_imports(no_cache=True))"
    assert re.search(r"[1-9]\d* kept, 0 broken", run("-c", code))


@pytest.mark.parametrize(
    ("line", "modules"),
    [
        ("import jax._src.core as c", ["jax._src.core"]),
        ("from jax import _src", ["jax._src"]),
        ("from jax._src.core import a, b", ["jax._src.core.a", "jax._src.core.b"]),
        ("from . import a", ["..a"]),
    ],
)
def test_imports_are_read_in_every_spelling(line: str, modules: list[str]):
    assert list(imported(ast.parse(line))) == modules


@pytest.mark.parametrize("path", CODE, ids=names(CODE))
def test_private_jax_is_used_in_one_file_only(path: Path):
    if path == ROOT / "remat_kit" / "_jax.py":
        return
    source = path.read_text(encoding="utf-8")
    private = [module for module in imported(ast.parse(source)) if f"{module}.".startswith("jax._src.")]
    private += [
        ast.unparse(node) for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Attribute) and node.attr == "_src"
    ]
    assert not private


@pytest.mark.parametrize("path", CODE, ids=names(CODE))
def test_files_and_functions_are_short_and_documented(path: Path):
    source = path.read_text(encoding="utf-8")
    tree = ast.parse(source)
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    assert {node.name: body_lines(node) for node in functions if body_lines(node) > MAX_BODY_LINES} == {}
    assert len(source.splitlines()) <= MAX_FILE_LINES
    assert ast.get_docstring(tree) is not None


def test_importing_any_module_changes_neither_environment_nor_jax_config():
    modules = [".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__") for path in PACKAGE]
    run(
        "-c",
        "import importlib, os, sys, flax.linen, flax.nnx, jax\n"
        "before = dict(os.environ), dict(jax.config.values), list(sys.path)\n"
        f"for module in {modules}: importlib.import_module(module)\n"
        "assert (dict(os.environ), dict(jax.config.values), list(sys.path)) == before\n",
    )


def test_the_command_line_and_the_callers_side_of_compare_load_no_jax():
    run("-c", "import sys, remat_kit.cli, remat_kit.verbs.compare\nassert not {'jax', 'jaxlib', 'flax'} & set(sys.modules)")


def test_every_dependency_has_a_pin_and_pins_are_versions_only():
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pins = [line for line in lines if not line.startswith("#")]
    assert [line for line in pins if not re.fullmatch(r"[a-z0-9-]+==[\w.]+(; python_version (<|>=) '3\.12')?", line)] == []
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    wanted = [*project["dependencies"], *(text for extra in project["optional-dependencies"].values() for text in extra)]
    found = {re.match(r"[A-Za-z0-9-]+", text)[0].lower() for text in wanted}  # pyright: ignore[reportOptionalSubscript]
    assert found - {"remat-kit"} <= {line.split("==")[0] for line in pins}


def test_wheel_ships_the_package_alone(tmp_path: Path):
    run("-m", "hatchling", "build", "--target", "wheel", "--directory", str(tmp_path))
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        shipped = set(archive.namelist())
        script = archive.read(next(name for name in shipped if name.endswith("entry_points.txt"))).decode()
    assert {name.split("/")[0] for name in shipped if ".dist-info/" not in name} == {"remat_kit"}
    files = {path for path in (ROOT / "remat_kit").rglob("*") if path.is_file() and "__pycache__" not in path.parts}
    assert {str(path.relative_to(ROOT)) for path in files} <= shipped
    assert "remat-kit = remat_kit.cli:main" in script
