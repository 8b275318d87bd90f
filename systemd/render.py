"""Renders the units of a node for one installation: ``render.py --bin /opt/treadle/bin --out DIR``.

Every file of this directory that describes an installed node is copied to DIR with ``@BIN@`` (the directory of
the Python that has the packages), ``@NODE@`` (the node's name, also in file names) and ``@SANDBOX@`` (what all
services may not do) filled in.
"""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path

HERE = Path(__file__).parent
TEMPLATES = (
    "treadle-broker.service",
    "treadle-worker@.service",
    "treadle-drain.service",
    "treadle.target",
    "treadle.sysusers.conf",
    "treadle.tmpfiles.conf",
    "treadle.toml.example",
    "gpu.conf.example",
)
DEFAULT_NODE = "treadle"
_NODE = re.compile(r"[a-z][a-z0-9-]{0,30}")  # a unit name, a directory under /run and a short socket path
_BIN = re.compile(r"/[^\s\"'\\$;]*")  # what ExecStart= takes as one word without quoting


class RenderError(ValueError):
    """An argument that would give broken units; the message names it."""


def render(bin_dir: str, node: str = DEFAULT_NODE) -> dict[str, str]:
    """The rendered files by name. Raises RenderError."""
    if not _BIN.fullmatch(bin_dir):
        raise RenderError(f"BIN must be an absolute path without spaces and quotes, not {bin_dir!r}")
    if not _NODE.fullmatch(node):
        raise RenderError(f"NODE must be lower-case letters, digits and dashes, 31 at most, not {node!r}")
    values = {
        "@BIN@": bin_dir.rstrip("/").replace("%", "%%"),
        "@NODE@": node,
        "@SANDBOX@": (HERE / "sandbox.conf").read_text().rstrip("\n"),
    }
    return {_renamed(name, node): _filled((HERE / name).read_text(), values) for name in TEMPLATES}


def _renamed(name: str, node: str) -> str:
    return node + name.removeprefix(DEFAULT_NODE) if name.startswith(DEFAULT_NODE) else name


def _filled(text: str, values: dict[str, str]) -> str:
    return re.sub(r"@[A-Z]+@", lambda match: values[match[0]], text)


def main(arguments: list[str] | None = None) -> int:
    """Write the files and print their paths; 2 for arguments that cannot be used."""
    parser = argparse.ArgumentParser(description="Render the units of a Treadle node.")
    parser.add_argument("--bin", required=True, help="directory of the python that runs the node")
    parser.add_argument("--out", default="build/units", type=Path, help="directory to write to (build/units)")
    parser.add_argument("--node", default=DEFAULT_NODE, help="name of the node (treadle)")
    given = parser.parse_args(arguments)
    try:
        files = render(given.bin, given.node)
    except RenderError as error:
        parser.error(str(error))
    given.out.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (given.out / name).write_text(text)
        print(given.out / name)
    return 0


if __name__ == "__main__":
    sys.exit(main())
