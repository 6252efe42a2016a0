"""A stand-in for the engine core: speaks engine_core.proto and invents its tokens.

The token at output position i is prompt[i % len(prompt)], shifted by the seed when the temperature is not 0: a
function of the request alone, so that another process continues a request as this one would have. The most likely
tokens it reports are the sampled id, then 0, 1, 2, …; the token at position i of the prompt has −i. It takes a
It claims to have found as many tokens in its cache as the request's salt has characters.
structured output only with a vocabulary that spells the prompt's ids, and ignores it; it knows one custom logits
processor, "known".

python fake_core.py --socket-path PATH --parent-pid PID --spawned-at-ns NS --behaviour JSON, where JSON may hold
  step_s         seconds between steps
  hold_file      while this file exists no step is made
  exit_file      when this file exists at the start, the core exits 3 with the file's content on stderr
  poison_id      a request whose prompt holds this id kills the core at its third token
  hang_id        a request whose prompt holds this id stops the core's steps at its third token
  exit_if_max_model_len          started with this --max-model-len, the core exits 1
  never_ready_if_max_model_len   started with this --max-model-len, it never listens
  other_tokens_if_max_model_len  started with this --max-model-len, it is off by one token
  abort_log      file to which the ids of aborted requests are appended
  max_model_len  what Stats says
  ignore_term    SIGTERM and Drain have no effect
  drain_on_term  SIGTERM drains, and new requests are refused from then on
  chatter        bytes that it says on stderr with every token
  tokens_per_step   tokens of a request in one output, as if guesses had been kept
"""

from __future__ import annotations

import argparse
import asyncio
import ctypes
import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import grpc.aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from preload.protos import engine_core_pb2 as pb
from preload.protos import engine_core_pb2_grpc as pb_grpc
from preload.protos import weight_cache_pb2

PR_SET_PDEATHSIG = 1
TOKEN_SHIFT = [0]


class Running:
    def __init__(self, add: pb.AddRequest) -> None:
        self.add = add
        self.position = len(add.output_ids)

    def next_token(self) -> int:
        prompt = self.add.prompt_ids
        shift = self.add.sampling.seed if self.add.sampling.temperature else 0
        token = prompt[(self.position + shift + TOKEN_SHIFT[0]) % len(prompt)]
        self.position += 1
        return token

    def step(self) -> pb.RequestOutput:
        sampling = self.add.sampling
        token = self.next_token()
        finish = pb.FINISH_REASON_NONE
        if token in sampling.stop_token_ids and self.position > sampling.min_tokens:
            finish = pb.FINISH_REASON_STOP
        elif self.position >= sampling.max_tokens:
            finish = pb.FINISH_REASON_LENGTH
        logprobs = []
        if sampling.logprobs:
            top = [token, *(i for i in range(sampling.num_top_logprobs) if i != token)]
            top = top[: sampling.num_top_logprobs]
            own = -0.5 - TOKEN_SHIFT[0]
            values = [own - rank for rank in range(len(top))]
            logprobs = [pb.TokenLogprobs(logprob=own, top_ids=top, top_logprobs=values)]
        return pb.RequestOutput(
            request_id=self.add.request_id,
            token_ids=[token],
            logprobs=logprobs,
            finish_reason=finish,
            prompt_logprobs=self._prompt_logprobs(),
            num_cached_tokens=len(self.add.cache_salt) if self.position == 1 else 0,
        )

    def _prompt_logprobs(self) -> list[pb.TokenLogprobs]:
        if not self.add.sampling.HasField("prompt_logprobs"):
            return []
        self.add.sampling.ClearField("prompt_logprobs")
        ids = self.add.prompt_ids
        return [
            pb.TokenLogprobs(logprob=-i, top_ids=[7, ids[i]], top_logprobs=[-0.5, -i], rank=2)
            for i in range(1, len(ids))
        ]

    def refusal(self, vocabulary: pb.Vocabulary | None) -> tuple[str, str]:
        """Why the request cannot be taken, and the parameter that is wrong."""
        sampling = self.add.sampling
        for name in sampling.logits_processors:
            if name != "known":
                return f"there is no logits processor {name!r} here", "logits_processors"
        spelled = vocabulary is not None and all(vocabulary.tokens[i] for i in self.add.prompt_ids)
        if sampling.HasField("structured_output") and not spelled:
            return "no vocabulary for it", "structured_outputs"
        return "", ""


class FakeCore(pb_grpc.EngineCoreServicer):
    def __init__(self, behaviour: dict[str, Any], spawned_at_ns: int, standby: bool) -> None:
        self.behaviour = behaviour
        self.spawned_at_ns = spawned_at_ns
        self.ready_at_ns = 0
        self.running: dict[str, Running] = {}
        self.refused: list[str] = []
        self.draining = asyncio.Event()
        self.num_output_tokens = 0
        self.num_steps = 0
        self.standby = standby
        self.vocabulary: pb.Vocabulary | None = None

    async def Generate(self, request_iterator, context):  # noqa: N802
        if self.standby:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, "a standby")
        reader = asyncio.create_task(self._read(request_iterator))
        try:
            while True:
                await asyncio.sleep(self.behaviour.get("step_s", 0.0005))
                if self.refused:
                    yield pb.StepOutput(outputs=[_draining(self.refused.pop())])
                hold = self.behaviour.get("hold_file")
                if not self.running or (hold and Path(hold).exists()):
                    if self.draining.is_set() and not self.running:
                        return
                    continue
                if any(self._hangs(r) for r in self.running.values()):
                    continue
                self.num_steps += 1
                yield pb.StepOutput(outputs=[self._step(r) for r in list(self.running.values())])
        finally:
            reader.cancel()
            self.running.clear()

    def _hangs(self, running: Running) -> bool:
        return self.behaviour.get("hang_id") in running.add.prompt_ids and running.position >= 2

    async def Promote(self, request, context):  # noqa: N802
        self.standby = False
        return pb.PromoteResponse()

    def _step(self, running: Running) -> pb.RequestOutput:
        if self.behaviour.get("poison_id") in running.add.prompt_ids and running.position >= 2:
            os.kill(os.getpid(), signal.SIGKILL)
        if self.behaviour.get("chatter"):
            print("x" * self.behaviour["chatter"], file=sys.stderr, flush=True)
        error, param = running.refusal(self.vocabulary)
        if error:
            del self.running[running.add.request_id]
            return pb.RequestOutput(
                request_id=running.add.request_id,
                finish_reason=pb.FINISH_REASON_ERROR,
                error=error,
                refused=True,
                param=param,
            )
        output = running.step()
        for _ in range(1, self.behaviour.get("tokens_per_step", 1)):
            output.num_draft_tokens += 1
            if output.finish_reason:
                continue
            more = running.step()
            output.num_accepted_tokens += 1
            output.token_ids.extend(more.token_ids)
            output.logprobs.extend(more.logprobs)
            output.finish_reason = more.finish_reason
        self.num_output_tokens += len(output.token_ids)
        if output.finish_reason:
            del self.running[running.add.request_id]
        return output

    async def _read(self, requests) -> None:
        async for request in requests:
            if request.WhichOneof("request") == "add" and self.draining.is_set():
                self.refused.append(request.add.request_id)
            elif request.WhichOneof("request") == "add":
                self.running[request.add.request_id] = Running(request.add)
            elif request.WhichOneof("request") == "vocabulary":
                self.vocabulary = request.vocabulary
            elif self.running.pop(request.abort.request_id, None) is not None and "abort_log" in self.behaviour:
                with open(self.behaviour["abort_log"], "a") as log:
                    log.write(request.abort.request_id + "\n")

    async def Drain(self, request, context):  # noqa: N802
        if not self.behaviour.get("ignore_term"):
            self.draining.set()
        return pb.DrainResponse(num_running=len(self.running))

    async def Stats(self, request, context):  # noqa: N802
        phases = [
            weight_cache_pb2.Phase(name="exec", start_ns=self.spawned_at_ns, end_ns=self.ready_at_ns),
            weight_cache_pb2.Phase(name="ready", start_ns=self.ready_at_ns, end_ns=self.ready_at_ns),
        ]
        return pb.StatsResponse(
            pid=os.getpid(),
            num_running=len(self.running),
            num_steps=self.num_steps,
            standby=self.standby,
            num_output_tokens=self.num_output_tokens,
            max_model_len=self.behaviour.get("max_model_len", 8192),
            phases=phases,
        )


def _draining(request_id: str) -> pb.RequestOutput:
    error = pb.FINISH_REASON_ERROR
    return pb.RequestOutput(request_id=request_id, finish_reason=error, error="it is draining", draining=True)


async def main(options: argparse.Namespace) -> None:
    behaviour = json.loads(options.behaviour)
    TOKEN_SHIFT[0] = int(behaviour.get("other_tokens_if_max_model_len", -1) == options.max_model_len)
    core = FakeCore(behaviour, options.spawned_at_ns, options.standby)
    server = grpc.aio.server()
    pb_grpc.add_EngineCoreServicer_to_server(core, server)
    checks = health.aio.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(checks, server)
    server.add_insecure_port(f"unix:{options.socket_path}")
    await server.start()
    if behaviour.get("ignore_term"):
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    elif behaviour.get("drain_on_term"):
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, core.draining.set)
    core.ready_at_ns = time.monotonic_ns()
    if not options.standby:
        await checks.set("", health_pb2.HealthCheckResponse.SERVING)
    print("fake core is serving", file=sys.stderr, flush=True)
    await core.draining.wait()
    await server.stop(5)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--socket-path", required=True)
    parser.add_argument("--parent-pid", type=int, required=True)
    parser.add_argument("--spawned-at-ns", type=int, default=0)
    parser.add_argument("--behaviour", default="{}")
    parser.add_argument("--max-model-len", type=int, default=0)
    parser.add_argument("--standby", action="store_true")
    arguments = parser.parse_args()
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != arguments.parent_pid:
        sys.exit("the parent is gone")
    told = json.loads(arguments.behaviour)
    if told.get("exit_if_max_model_len", -1) == arguments.max_model_len:
        sys.exit("this configuration cannot be served")
    while told.get("never_ready_if_max_model_len", -1) == arguments.max_model_len:
        time.sleep(3600)
    exit_file = told.get("exit_file")
    if exit_file and os.path.exists(exit_file):
        print(Path(exit_file).read_text(), file=sys.stderr)
        sys.exit(3)
    asyncio.run(main(arguments))
