"""Puts the parts of a frontend together from its configuration."""

from __future__ import annotations

import time

from preload.engine.timeline import Timeline

from .admission import Admission
from .auth import ApiKeys
from .config import FrontendConfig
from .core_process import CoreProcess
from .core_records import CoreRecords
from .deployment_factory import DeploymentFactory, MakeCoreCommand, load_text_side
from .metrics import Metrics
from .service import Service


def build_service(
    config: FrontendConfig,
    make_command: MakeCoreCommand,
    socket_dir: str,
    first_core: CoreProcess,
    timeline: Timeline,
) -> Service:
    """Everything but the listening socket; supervision is not started. Raises StartError.

    Call it within the event loop, with a core that has been started."""
    keys = ApiKeys.from_file(config.api_key_file)
    with timeline.phase("tokenizer"):
        text_side = load_text_side(config)
    metrics = Metrics()
    records = CoreRecords(socket_dir, first_core)
    factory = DeploymentFactory(make_command=make_command, records=records, metrics=metrics)
    return Service(
        config=config,
        socket_dir=socket_dir,
        keys=keys,
        metrics=metrics,
        admission=Admission(config.max_concurrent_requests, config.max_queued_requests, metrics),
        factory=factory,
        records=records,
        current=factory.make(config, text_side),
        timeline=timeline,
        created_s=int(time.time()),
    )
