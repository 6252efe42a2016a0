"""Puts the parts of a frontend together from its configuration."""

from __future__ import annotations

import time
from pathlib import Path

from preload.engine.timeline import Timeline

from .admission import Admission
from .auth import ApiKeys
from .chat_template import ChatTemplate
from .config import FrontendConfig
from .core_process import CoreCommand
from .errors import StartError
from .metrics import Metrics
from .requests import InFlight
from .service import Service
from .supervisor import Supervisor
from .tokenizer import Tokenizer
from .tokenizer_files import load_tokenizer


def build_service(config: FrontendConfig, command: CoreCommand, socket_dir: str, timeline: Timeline) -> Service:
    """Everything but the listening socket. Raises StartError; call it within the event loop."""
    keys = ApiKeys.from_file(config.api_key_file)
    with timeline.phase("tokenizer"):
        tokenizer = load_tokenizer(config.checkpoint, config.tokenizer)
        template = _chat_template(config, tokenizer)
    metrics = Metrics()
    in_flight = InFlight(metrics)
    supervisor = Supervisor(
        command=command,
        socket_dir=socket_dir,
        in_flight=in_flight,
        metrics=metrics,
        ready_timeout_s=config.core_ready_timeout_s,
    )
    return Service(
        config=config,
        tokenizer=tokenizer,
        chat_template=template,
        keys=keys,
        metrics=metrics,
        in_flight=in_flight,
        supervisor=supervisor,
        admission=Admission(config.max_concurrent_requests, config.max_queued_requests, metrics),
        timeline=timeline,
        created_s=int(time.time()),
    )


def _chat_template(config: FrontendConfig, tokenizer: Tokenizer) -> ChatTemplate | None:
    origin = config.chat_template or config.tokenizer or config.checkpoint
    source = tokenizer.chat_template
    if config.chat_template:
        try:
            source = Path(config.chat_template).read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            raise StartError(f"the chat template {config.chat_template} cannot be read: {error}") from error
    if not source:
        return None
    return ChatTemplate(source, origin=origin, special_tokens=tokenizer.special_tokens)
