"""`DeploymentFactory`: from a configuration to a Deployment, at the start and for every update."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from .chat_template import ChatTemplate
from .config import FrontendConfig
from .core_process import CoreCommand
from .core_records import CoreRecords
from .deployment import Deployment
from .errors import StartError
from .hold import WeightsHold
from .metrics import Metrics
from .requests import InFlight
from .supervisor import Supervisor, SupervisorOptions
from .tokenizer import Tokenizer
from .tokenizer_files import load_tokenizer

MakeCoreCommand = Callable[[FrontendConfig, bool], CoreCommand]
"""(configuration, whether a standby is wanted) to the command of its cores."""


@dataclass(frozen=True, kw_only=True)
class TextSide:
    """What turns text into tokens and back, and conversations into text."""

    tokenizer: Tokenizer
    chat_template: ChatTemplate | None


def load_text_side(config: FrontendConfig) -> TextSide:
    """Reads files, for some tenths of a second. Raises StartError naming the file."""
    if not (config.tokenizer or config.checkpoint):
        raise StartError("a generation without its checkpoint needs --tokenizer: a tokenizer.json or a GGUF file")
    tokenizer = load_tokenizer(config.checkpoint, config.tokenizer)
    return TextSide(tokenizer=tokenizer, chat_template=_chat_template(config, tokenizer))


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


@dataclass(frozen=True, kw_only=True)
class DeploymentFactory:
    """What all deployments of a frontend have in common."""

    make_command: MakeCoreCommand
    records: CoreRecords
    metrics: Metrics

    def make(self, config: FrontendConfig, text_side: TextSide, hold: WeightsHold | None = None) -> Deployment:
        """Idle; call it within the event loop. `hold`: on the same weights, shared with whoever has it.

        Raises RequestError on an impossible configuration."""
        in_flight = InFlight(self.metrics)
        options = SupervisorOptions(
            command=self.make_command(config, False),
            standby_command=self.make_command(config, True),
            num_standbys=config.standby,
            ready_timeout_s=config.core_ready_timeout_s,
            step_timeout_s=config.step_timeout_s,
        )
        supervisor = Supervisor(options=options, records=self.records, in_flight=in_flight, metrics=self.metrics)
        return Deployment(
            config=config,
            tokenizer=text_side.tokenizer,
            chat_template=text_side.chat_template,
            in_flight=in_flight,
            supervisor=supervisor,
            hold=hold or WeightsHold(config),
        )
