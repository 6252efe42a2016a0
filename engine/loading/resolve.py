"""Checkpoint × recipe → steps: which stored tensor becomes which resident one.

Owns the promise that the model and the files agree: every tensor the model needs is there in the right shape, and
every stored tensor is either needed, tied, or known to be without meaning. Anything else is a CheckpointError that
names file and tensor. Decides layouts; converts nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from preload.engine.errors import CheckpointError, RequestError
from preload.engine.models.configs import apply_overrides, spec_from_config
from preload.engine.models.gguf_config import config_from_gguf
from preload.engine.models.llama_names import (
    EMBEDDING,
    LM_HEAD,
    ROPE_FREQS,
    ROUTER,
    ExpectedTensor,
    canonical_name,
    expected_tensors,
    is_ignorable,
    permuted_head_dim,
    stacked_experts,
)
from preload.engine.models.spec import ModelSpec
from preload.engine.recipe import Recipe

from .checkpoint import Checkpoint, open_checkpoint
from .dtypes import FLOAT_DTYPES
from .files import TensorInfo, fault
from .gguf_types import BLOCK_TYPES
from .packed import KEY as PACKING_KEY
from .packed import packed_step, read_packing, split_packed
from .resident_parts import GROUP_SIZES, PIECE_ROWS, resident_parts
from .steps import Packing, Resolved, Step, Target

MODELS = ("auto", "llama", "mixtral", "raw")
_DENSE_DTYPES = {"f32": "float32", "bf16": "bfloat16"}


def open_and_resolve(path: str, recipe: Recipe) -> tuple[Checkpoint, Resolved]:
    """Opens the checkpoint and decides what becomes of it.

    Raises RequestError for a recipe that cannot be, CheckpointError for files that cannot be used.
    """
    if recipe.model not in MODELS:
        raise RequestError(f"unknown model {recipe.model!r}; known are {', '.join(MODELS)}")
    if recipe.model != "raw":
        checkpoint = open_checkpoint(path)
        return checkpoint, _resolve_llama(checkpoint, recipe)
    if recipe.quantization != "keep":
        raise RequestError(f"model 'raw' keeps weights as they are; it has no quantization {recipe.quantization!r}")
    if recipe.config_overrides:
        raise RequestError("model 'raw' reads no configuration; it takes no configuration overrides")
    checkpoint = open_checkpoint(path, with_config=False)
    steps = [Step(tensor, (_as_stored(tensor, tensor.name),)) for tensor in checkpoint.tensors]
    return checkpoint, Resolved("raw", recipe, None, steps)


def _resolve_llama(checkpoint: Checkpoint, recipe: Recipe) -> Resolved:
    packing = read_packing(checkpoint)
    spec = _spec(checkpoint, recipe, packing)
    if recipe.model not in ("auto", spec.family):
        raise RequestError(
            f"model {recipe.model!r} is asked for, and {checkpoint.config_path} describes a {spec.family}"
        )
    _check_counts(checkpoint, spec)
    expected, stacks = expected_tensors(spec), stacked_experts(spec)
    in_stacks = {part for parts in stacks.values() for part in parts}
    is_gguf = checkpoint.format == "gguf"
    stored: dict[str, TensorInfo] = {}
    steps: list[Step] = []
    plain, packed = split_packed(checkpoint.tensors, packing)
    for tensor in plain:
        name = canonical_name(tensor.name) if is_gguf else tensor.name
        if name in stored:
            raise fault(tensor.file.path, f"is there under two names, the other is {stored[name].name}", tensor.name)
        stored[name] = tensor
        if is_ignorable(name) or (name == LM_HEAD and spec.tie_word_embeddings):
            steps.append(Step(tensor))
            continue
        if name == ROPE_FREQS and is_gguf:
            steps.append(_rope_freqs(tensor, spec))
            continue
        _check_shape(tensor, expected.get(name), checkpoint, spec)
        if name not in in_stacks:
            steps.append(_step(tensor, name, recipe, permuted_head_dim(name, spec) if is_gguf else 0))
    for name, parts in packed.items():
        assert packing is not None
        if name in in_stacks:
            raise fault(parts["qweight"].file.path if "qweight" in parts else checkpoint.path, "belongs to an expert "
                        f"that {packing.method} has quantized, which is not supported; load the model's own "
                        "checkpoint and choose a quantization", name)  # fmt: skip
        steps.append(packed_step(name, parts, expected.get(name), packing, recipe.quantization))
        if name in stored:
            raise fault(stored[name].file.path, "is there twice, plain and packed", name)
        stored[name] = steps[-1].source
    _check_complete(checkpoint, expected, stored, spec)
    steps += [_stacked_step(name, [stored[part] for part in parts], recipe) for name, parts in stacks.items()]
    if not spec.tie_word_embeddings:
        return Resolved(spec.family, recipe, spec, steps, packing=packing)
    aliases = _lm_head_aliases(steps)
    return Resolved(spec.family, recipe, spec, steps, aliases, _tied_sources(stored), packing)


def _check_counts(checkpoint: Checkpoint, spec: ModelSpec) -> None:
    """Names are made for every layer and expert, so there may be no more of them than tensors."""
    for key, count in (("num_hidden_layers", spec.num_layers), ("num_local_experts", spec.num_experts)):
        if count > len(checkpoint.tensors):
            raise CheckpointError(
                f"{checkpoint.config_path}: {key}={count}, but {checkpoint.path} holds only "
                f"{len(checkpoint.tensors)} tensors; correct the configuration",
                {"file": checkpoint.config_path, "key": key},
            )


def _spec(checkpoint: Checkpoint, recipe: Recipe, packing: Packing | None) -> ModelSpec:
    path = checkpoint.config_path
    if checkpoint.format == "gguf":
        shapes = {tensor.name: tensor.shape for tensor in checkpoint.tensors}
        config = config_from_gguf(checkpoint.metadata, shapes, path)
    else:
        config = dict(checkpoint.config or {})
        if packing is not None:
            config.pop(PACKING_KEY, None)
    return spec_from_config(apply_overrides(config, recipe.config_overrides), path)


def _check_shape(
    tensor: TensorInfo, expected: ExpectedTensor | None, checkpoint: Checkpoint, spec: ModelSpec
) -> None:
    path = tensor.file.path
    if expected is None:
        raise fault(path, f"is unexpected: a {spec.family} model with the configuration of {checkpoint.config_path} "
                    "has no use for it; correct the configuration or the file", tensor.name)  # fmt: skip
    if tensor.shape != expected.shape:
        values = _spec_values(spec)
        keys = ", ".join(f"{key}={values[key]}" for key in expected.keys)
        raise fault(path, f"has shape {list(tensor.shape)}, but {checkpoint.config_path} ({keys}) needs "
                    f"{list(expected.shape)}; correct the configuration or the file", tensor.name)  # fmt: skip
    if len(tensor.shape) == 1 and tensor.dtype not in FLOAT_DTYPES:
        raise fault(path, f"is a vector stored as {tensor.dtype}; vectors are loaded from "
                    f"{', '.join(FLOAT_DTYPES)}: convert the checkpoint", tensor.name)  # fmt: skip
    if tensor.dtype not in FLOAT_DTYPES and not tensor.dtype.startswith("gguf."):
        known = ", ".join(FLOAT_DTYPES)
        raise fault(path, f"is stored as {tensor.dtype}; a {spec.family} model loads from {known} or GGUF blocks: "
                    "convert the checkpoint", tensor.name)  # fmt: skip


def _spec_values(spec: ModelSpec) -> dict[str, int]:
    return {
        "vocab_size": spec.vocab_size,
        "hidden_size": spec.hidden_size,
        "intermediate_size": spec.intermediate_size,
        "num_attention_heads": spec.num_heads,
        "num_key_value_heads": spec.num_kv_heads,
        "head_dim": spec.head_dim,
        "num_nextn_predict_layers": spec.num_mtp_layers,
        "num_local_experts": spec.num_experts,
    }


def _check_complete(
    checkpoint: Checkpoint, expected: dict[str, ExpectedTensor], stored: dict[str, TensorInfo], spec: ModelSpec
) -> None:
    missing = [name for name in expected if name not in stored]
    if not missing:
        return
    name, path = missing[0], checkpoint.path
    if name == LM_HEAD:
        raise fault(path, "is missing, though tie_word_embeddings is false; set tie_word_embeddings=true if the "
                    "output shares the embedding, else fetch the checkpoint again", name)  # fmt: skip
    others = f" (and {len(missing) - 1} more)" if len(missing) > 1 else ""
    raise fault(path, f"is missing{others}, though {checkpoint.config_path} (num_hidden_layers={spec.num_layers}) "
                "needs it; fetch the checkpoint again", name)  # fmt: skip


def _as_stored(tensor: TensorInfo, name: str) -> Target:
    """The resident tensor with the same bytes. GGUF blocks become rows of bytes."""
    if not tensor.dtype.startswith("gguf."):
        return Target(name, tensor.dtype, tensor.shape)
    block = BLOCK_TYPES[tensor.dtype.removeprefix("gguf.")]
    num_row_bytes = tensor.shape[-1] // block.block_size * block.block_bytes
    return Target(name, "uint8", (*tensor.shape[:-1], num_row_bytes), tensor.dtype)


def _step(tensor: TensorInfo, name: str, recipe: Recipe, head_dim: int) -> Step:
    """What the recipe makes of one weight of the model."""
    targets = _targets(tensor, name, recipe)
    as_stored = targets == (_as_stored(tensor, name),)
    return Step(tensor, targets, converts=not as_stored, permuted_head_dim=head_dim)


def _stacked_step(name: str, tensors: list[TensorInfo], recipe: Recipe) -> Step:
    """One resident weight of several stored ones, whose rows follow one another."""
    first, *others = tensors
    for other in others:
        if other.dtype != first.dtype:
            raise fault(other.file.path, f"is stored as {other.dtype}, but {first.name}, beside which it is to lie, "
                        f"as {first.dtype}: convert the checkpoint", other.name)  # fmt: skip
    rows_at_once = PIECE_ROWS.get(recipe.quantization, 1)
    if any(tensor.shape[0] % rows_at_once for tensor in tensors):
        raise fault(first.file.path, f"has {first.shape[0]} rows, not a multiple of {recipe.quantization}'s "
                    f"{rows_at_once}, and belongs to an expert; choose another quantization", first.name)  # fmt: skip
    whole = replace(first, shape=(sum(tensor.shape[0] for tensor in tensors), *first.shape[1:]))
    targets = _targets(whole, name, recipe)
    return Step(first, targets, converts=targets != (_as_stored(whole, name),), others=tuple(others))


def _targets(tensor: TensorInfo, name: str, recipe: Recipe) -> tuple[Target, ...]:
    if len(tensor.shape) == 1 or (name.endswith(f"{ROUTER}.weight") and recipe.quantization not in _DENSE_DTYPES):
        return (Target(name, recipe.compute_dtype, tensor.shape),)  # a router's few weights decide too much
    if recipe.quantization == "keep":
        return (_as_stored(tensor, name),)
    if recipe.quantization in _DENSE_DTYPES:
        return (Target(name, _DENSE_DTYPES[recipe.quantization], tensor.shape),)
    rows, cols = tensor.shape
    layout = recipe.quantization
    group_size = GROUP_SIZES.get(layout, 1)
    if cols % group_size:
        raise fault(tensor.file.path, f"has {cols} columns, not a multiple of {layout}'s group of {group_size}; "
                    "choose another quantization", tensor.name)  # fmt: skip
    return tuple(
        Target(name if part == "weight" else f"{name}_{part}", dtype, shape, layout)
        for part, (dtype, shape) in resident_parts(layout, rows, cols).items()
    )


def _rope_freqs(tensor: TensorInfo, spec: ModelSpec) -> Step:
    """llama.cpp's spelling of llama3 scaling: a divisor for each inverse frequency."""
    expected = (spec.head_dim // 2,)
    if tensor.shape != expected or tensor.dtype != "float32":
        raise fault(tensor.file.path, f"is {tensor.dtype} {list(tensor.shape)}, but the model's head size needs "
                    f"float32 {list(expected)}; fetch the file again", tensor.name)  # fmt: skip
    if spec.rope.scaling != "none":
        raise fault(tensor.file.path, f"already scales the rotary embedding; rope scaling {spec.rope.scaling!r} "
                    "would scale it twice: remove the override", tensor.name)  # fmt: skip
    return Step(tensor, (Target(ROPE_FREQS, "float32", tensor.shape, is_buffer=True),))


def _lm_head_aliases(steps: list[Step]) -> list[tuple[Target, str]]:
    """lm_head.weight and its companions share the embedding's memory."""
    embedding = next(step for step in steps if step.targets and step.targets[0].name == EMBEDDING)
    return [
        (Target(target.name.replace(EMBEDDING, LM_HEAD), target.dtype, target.shape, target.layout), target.name)
        for target in embedding.targets
    ]


def _tied_sources(stored: dict[str, TensorInfo]) -> tuple[TensorInfo, TensorInfo] | None:
    """Output and embedding if both are stored though they are tied. Raises if they cannot be equal."""
    if LM_HEAD not in stored:
        return None
    head, embedding = stored[LM_HEAD], stored[EMBEDDING]
    if (head.dtype, head.shape) != (embedding.dtype, embedding.shape):
        raise _tied_but_different(head, embedding)
    return head, embedding


def check_tied(resolved: Resolved, digests: Mapping[str, bytes]) -> None:
    """Raises CheckpointError if tied weights that are stored twice differ. `digests`: by stored name."""
    if resolved.equal_sources is not None:
        head, embedding = resolved.equal_sources
        if digests[head.name] != digests[embedding.name]:
            raise _tied_but_different(head, embedding)


def _tied_but_different(head: TensorInfo, embedding: TensorInfo) -> CheckpointError:
    return fault(
        head.file.path,
        f"differs from {embedding.name}, though tie_word_embeddings is true; set tie_word_embeddings=false if "
        "the output has weights of its own",
        head.name,
    )
