"""llama-cpp-python's example server, run from its source package."""

from __future__ import annotations

import json
import subprocess
import sysconfig
import venv
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final

from comparison.errors import BenchmarkError
from comparison.http_driver import HOST, HttpDriver
from comparison.job import Job
from comparison.llama_server import answers, free_port
from comparison.names import PYTHON
from comparison.peers import Peers, Say
from comparison.systems import Running, Setting, System, process, ready

_NEEDS: Final = ("fastapi", "openai", "pydantic", "safetensors", "uvicorn", "websockets")
_NEVER: Final = -1e9  # a logit bias that no other logit makes up for: the server has no switch that ignores the end
_UNTOLD: Final = -1  # it streams text, not ids


class PythonServer(System):
    """The example server with as many sequences and as much context as the others have, in a split KV cache.

    It runs in an environment of its own in ``folder``, made when it is first needed; ``eog`` are the tokens it must
    never choose.
    """

    name = PYTHON

    def __init__(self, peers: Peers, folder: Path, eog: Sequence[int], say: Say) -> None:
        self._program = peers.python_server
        self._folder = folder
        self._say = say
        self._bias = {str(token): _NEVER for token in eog}

    @asynccontextmanager
    async def run(self, setting: Setting) -> AsyncIterator[Running]:
        python = make_environment(self._folder, self._say)
        port = free_port()
        log = setting.scratch / "python-server.log"
        file = setting.scratch / "python-server.json"
        file.write_text(json.dumps(_config(setting, port)))
        async with process([str(python), str(self._program), "-C", str(file)], log, setting.environ) as child:
            await ready(child, log, lambda: answers(port, "/v1/models"), self.name)
            driver = HttpDriver(port, "/v1/completions", self._body, _tokens_of)
            yield Running(driver.ask, {"server": child.pid}, "server")

    def _body(self, job: Job) -> dict[str, Any]:
        return {
            "prompt": job.prompt,
            "max_tokens": job.new_tokens,
            "stream": True,
            "temperature": 0.0,
            "top_p": 1.0,
            "logit_bias": self._bias,
        }


def make_environment(folder: Path, say: Say) -> Path:
    """The interpreter of an environment with what the example server needs; made unless ``folder`` has it.

    llama-cpp-python itself is this interpreter's own, so that all run the same build. Raises BenchmarkError.
    """
    python = folder / "bin" / "python"
    done = folder / "complete"
    if done.exists():
        return python
    say("making the example server's environment")
    venv.create(folder, with_pip=True, clear=True)
    site = next(folder.glob("lib/python*/site-packages"))
    (site / "borrowed.pth").write_text(sysconfig.get_path("purelib") + "\n")
    if subprocess.run([str(python), "-m", "pip", "install", "--quiet", *_NEEDS]).returncode != 0:
        raise BenchmarkError("what the example server needs could not be installed; pip says why above")
    done.touch()
    return python


def _config(setting: Setting, port: int) -> dict[str, Any]:
    model = {
        "path": str(setting.model),
        "n_ctx": setting.sessions * setting.session_tokens,
        "n_seq_max": setting.sessions,
        "threads": setting.threads,
        "threads_batch": setting.threads,
        "kv_unified": False,
        "store_logits": False,
        "max_output_tokens": setting.session_tokens,
    }
    return {"server": {"host": HOST, "port": port}, "model": model}


def _tokens_of(event: dict[str, Any]) -> list[int]:
    """One token for each piece of text: pieces that complete no character are not sent, and so not counted."""
    if "error" in event:
        raise ValueError(str(event["error"]))
    return [_UNTOLD for choice in event.get("choices", ()) if choice.get("text")]
