"""The servers that are measured, each with the settings that suit it best, and how one is started and ended.

A server's life begins with a clock: `first_token_s` counts from exec to the first piece of the first answer. A target
says for every workload which command serves it; workloads with the same command share a life.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Protocol

from preload.bench.processes import BenchError, PrivateDaemon, preload_command
from preload.bench.workloads import Need

_POLL_S = 0.01
_STOP_S = 60.0
HOST = "127.0.0.1"


class ServerProcess:
    """A server that has answered once. Raises BenchError if it ends, or has not answered by the deadline.

    It leads a process group; with `ends_group` all that it started ends with it."""

    def __init__(
        self,
        command: list[str],
        log: Path,
        *,
        port: int,
        model: str,
        deadline_s: float,
        environment: Mapping[str, str] | None = None,
        ends_group: bool = True,
    ) -> None:
        self.model = model
        self.base_url = f"http://{HOST}:{port}/v1"
        self._command, self._log, self._port = command, log, port
        self._deadline_s, self._environment, self._ends_group = deadline_s, environment, ends_group

    def __enter__(self) -> ServerProcess:
        start_s = time.monotonic()
        with self._log.open("ab") as out:
            self._process = subprocess.Popen(
                self._command,
                stdout=out,
                stderr=out,
                stdin=subprocess.DEVNULL,
                env={**os.environ, **(self._environment or {})},
                start_new_session=True,
            )
        try:
            self._wait_for_first_token(start_s + self._deadline_s)
            self.first_token_s = time.monotonic() - start_s
        except BaseException:
            self.__exit__()
            raise
        return self

    def _wait_for_first_token(self, deadline_s: float) -> None:
        while not self._answers():
            if self._process.poll() is not None:
                raise BenchError(f"it ended with {self._process.returncode}: {self._last_words()}")
            if time.monotonic() > deadline_s:
                raise BenchError(f"it gave no answer within {self._deadline_s:.0f} s: {self._last_words()}")
            time.sleep(_POLL_S)

    def _answers(self) -> bool:
        """Whether a first piece of text arrived. A server that is still loading refuses or says so."""
        body = {"model": self.model, "prompt": "Once upon a time", "max_tokens": 1, "temperature": 0, "stream": True}
        connection = http.client.HTTPConnection(HOST, self._port, timeout=self._deadline_s)
        try:
            connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
            response = connection.getresponse()
            if response.status in (404, 503):
                return False
            if response.status != 200:
                raise BenchError(f"status {response.status}: {response.read().decode(errors='replace')}")
            return any(line.startswith(b"data: {") and b'"text"' in line for line in response)
        except (ConnectionError, http.client.RemoteDisconnected):
            return False
        finally:
            connection.close()

    def _last_words(self) -> str:
        """The end of its log, the last line first: of a traceback, that says most."""
        lines = self._log.read_text(errors="replace")[-1500:].strip().splitlines()
        return "\n".join([*lines[-1:], *lines[:-1]])

    def __exit__(self, *exc_info: object) -> None:
        """SIGTERM, and SIGKILL if that is not obeyed in time."""
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
        try:
            self._process.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        if self._ends_group:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)


class Target(Protocol):
    """A server under test. `settings` tells a reader what was run."""

    name: str

    def settings(self) -> dict[str, str]: ...

    def round(self) -> contextlib.AbstractContextManager[None]:
        """What stays up beside the server's lives during one round."""
        ...

    def shape(self, need: Need) -> Need:
        """The life that serves this need: equal shapes share one."""
        ...

    def serve(self, shape: Need) -> ServerProcess: ...


class Preload:
    """This project as a user has it: a daemon that holds the weights, and `preload serve` without any option, or
    with `words`."""

    def __init__(self, checkpoint: str, name: str = "preload", words: tuple[str, ...] = ()) -> None:
        self.name = name
        self._checkpoint = checkpoint
        self._words = words
        self.from_nothing_s: float | None = None

    def settings(self) -> dict[str, str]:
        return {"serve": " ".join(["preload serve", Path(self._checkpoint).name, *self._words])}

    @contextlib.contextmanager
    def round(self) -> Iterator[None]:
        """The first life loads the weights: from a daemon that starts to the first token is `from_nothing_s`."""
        start_s = time.monotonic()
        with PrivateDaemon() as daemon:
            self._daemon = daemon
            with self.serve(Need(1, 1)):
                self.from_nothing_s = time.monotonic() - start_s
            yield

    def shape(self, need: Need) -> Need:
        return Need(64, 8192)

    def serve(self, shape: Need) -> ServerProcess:
        port = free_port()
        command = preload_command(
            "serve", self._checkpoint, "--runtime-dir", self._daemon.runtime_dir, "--port", str(port),
            "--served-model-name", "model", *self._words,
        )  # fmt: skip
        log = self._daemon.folder / "serve.log"
        return ServerProcess(command, log, port=port, model="model", deadline_s=120, ends_group=False)


class LlamaCpp:
    """llama.cpp's own server on the same GGUF file, with as many slots as a workload has requests at once."""

    name = "llama.cpp"

    def __init__(self, checkpoint: str, binary: Path, log: Path, num_threads: int) -> None:
        self._checkpoint, self._binary, self._log = checkpoint, binary, log
        self._num_threads = num_threads

    def settings(self) -> dict[str, str]:
        return {"serve": as_told("llama-server", self._words(Need(1, 288), "PORT")) + " (-np, -c by workload)"}

    @contextlib.contextmanager
    def round(self) -> Iterator[None]:
        yield

    def shape(self, need: Need) -> Need:
        return need

    def serve(self, shape: Need) -> ServerProcess:
        port = free_port()
        return ServerProcess(self._words(shape, str(port)), self._log, port=port, model="model", deadline_s=60)

    def _words(self, shape: Need, port: str) -> list[str]:
        return [
            str(self._binary), "--model", self._checkpoint, "--host", HOST, "--port", port, "--alias", "model",
            "--threads", str(self._num_threads), "--threads-batch", str(self._num_threads),
            "--parallel", str(shape.slots), "--ctx-size", str(shape.slots * shape.context),
        ]  # fmt: skip


class Vllm:
    """vLLM for CPUs on the same weights, dequantized: it has no kernels for GGUF blocks on a CPU."""

    def __init__(self, model: Path, environment: Path, log: Path, dtype: str, *, compiled: bool = False) -> None:
        self.name = f"vllm-{dtype}" + ("-compiled" if compiled else "")
        self._model, self._environment, self._log = model, environment, log
        self._dtype, self._compiled = dtype, compiled

    def settings(self) -> dict[str, str]:
        variables = " ".join(f"{name}={value}" for name, value in self._variables().items() if "VLLM_CPU" in name)
        return {"serve": f"{variables} {as_told('python', self._words('PORT'))}"}

    @contextlib.contextmanager
    def round(self) -> Iterator[None]:
        yield

    def shape(self, need: Need) -> Need:
        return Need(64, 4096)

    def serve(self, shape: Need) -> ServerProcess:
        port = free_port()
        return ServerProcess(
            self._words(str(port)), self._log, port=port, model="model", deadline_s=400,
            environment=self._variables(),
        )  # fmt: skip

    def _words(self, port: str) -> list[str]:
        words = [
            str(self._environment / "bin" / "python"), "-m", "vllm.entrypoints.openai.api_server",
            "--model", str(self._model), "--host", HOST, "--port", port,
            "--served-model-name", "model", "--dtype", self._dtype, "--max-model-len", "4096",
            "--max-num-seqs", "64", "--disable-uvicorn-access-log",
        ]  # fmt: skip
        return words if self._compiled else [*words, "--enforce-eager"]

    def _variables(self) -> dict[str, str]:
        """Both cores compute, with the OpenMP library that vLLM recommends; nothing is looked up on a network."""
        variables = {
            "VLLM_CPU_KVCACHE_SPACE": "4",
            "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, sorted(os.sched_getaffinity(0)))),
            "VLLM_NO_USAGE_STATS": "1",
            "HF_HUB_OFFLINE": "1",
        }
        openmp = self._environment / "lib" / "libiomp5.so"
        return {**variables, "LD_PRELOAD": str(openmp)} if openmp.exists() else variables


def as_told(program: str, words: list[str]) -> str:
    """A command line for a reader elsewhere: of files, their names."""
    return " ".join([program, *(Path(word).name if "/" in word else word for word in words[1:])])


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return int(probe.getsockname()[1])
