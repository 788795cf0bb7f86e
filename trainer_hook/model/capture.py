"""Capture: the classifier's input in each forward pass of the training, and the loss of each sample.

The classifier layer gets a torch hook that only stores two references. torch.compile takes that into its graph without
a break, and neither autocast nor DistributedDataParallel notices it. The work (projection, cross-entropy, the copy to
the host) is done after the model has returned, outside of every graph and without gradients.

An **evaluation** gives the losses of chosen samples by the current model, from a forward pass that changes nothing.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from trainer_hook.isolation import ErrorBoundary, by_signal_handler
from trainer_hook.model.provenance import Shown, tensors_in

log = logging.getLogger("trainer_hook")

# A copy on the host that may not be complete yet: a function that waits for it.
HostCopy = Callable[[], npt.NDArray[Any]]

# The projection is the same on all machines and in all runs, so that stored embeddings can be compared with new ones.
_PROJECTION_SEED = 20_250_219
_FLOAT16_MAX = 65_504.0
# Samples in one forward pass: more than in a batch of a training, because there are no gradients.
_BATCH = 256


def find_classifier(model: nn.Module, given: str | nn.Module | None) -> nn.Module:
    """The layer `given`, itself or by name; without it the model's last Linear. Raises ValueError if there is none."""
    if isinstance(given, nn.Module):
        return given
    names: dict[str, nn.Module] = dict(model.named_modules())
    if given is not None:
        # Wrappers add a prefix to the name: DDP adds "module.", torch.compile adds "_orig_mod.".
        for name, module in names.items():
            if name == given or name.replace("_orig_mod.", "").removeprefix("module.") == given:
                return module
        raise ValueError(f"the model has no layer {given!r}")
    linear = [module for module in names.values() if isinstance(module, nn.Linear)]
    if not linear:
        raise ValueError("the model has no Linear layer: name its classifier with HookOptions(classifier=)")
    return linear[-1]


def projection(width: int, dimension: int) -> Tensor:
    """A fixed Gaussian matrix (width, dimension); it keeps lengths on average (Johnson and Lindenstrauss, 1984)."""
    generator = torch.Generator().manual_seed(_PROJECTION_SEED + width)
    matrix: Tensor = torch.randn(width, dimension, generator=generator) / dimension**0.5
    return matrix


class Seen(NamedTuple):
    """The embeddings of some rows of a forward pass, and their losses if they are known.

    Both are functions that may wait for the device, so the training's thread must not call them.
    """

    embeddings: HostCopy
    losses: HostCopy | None


class Capture:
    """Calls `forward(shown)` after each forward pass of the training; `forward` calls `see` if it knows the samples."""

    def __init__(
        self,
        model: nn.Module,
        classifier: nn.Module,
        dimension: int,
        boundary: ErrorBoundary,
        forward: Callable[[Shown], None],
        raw: bool = False,
    ) -> None:
        """Embeddings have `dimension` numbers at most and, unless they are `raw`, come from vectors of length 1."""
        self._dimension, self._raw = dimension, raw
        self._boundary, self._forward = boundary, forward
        # The model and the modules around the classifier have hooks. Of the outermost one that runs now: its arguments,
        # its depth, and how often the classifier ran in it.
        self._given: Any = None
        self._outermost = -1
        self._runs = 0
        self._latest: tuple[Tensor, Tensor | None] | None = None
        self._model_returns = False
        self._projections: dict[tuple[int, torch.device], Tensor] = {}
        self.seen = 0
        self.device = torch.device("cpu")
        """The device of the classifier's input in the latest forward pass."""
        _have_compiled_code_see_hooks()
        self._handles = []
        # The order matters if the classifier is the whole model: its input is stored before it is handed on.
        around = modules_around(model, classifier)
        for depth, module in enumerate(around):
            enter = _Callback(self._enter, depth)
            self._handles.append(module.register_forward_pre_hook(enter, with_kwargs=True))
        self._handles.append(classifier.register_forward_hook(_Callback(self._keep, 0)))
        for depth, module in enumerate(around):
            self._handles.append(module.register_forward_hook(_Callback(self._returned, depth)))

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()

    def _enter(self, depth: int, module: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any]) -> None:
        if _is_replica(module):
            return
        if not torch.compiler.is_compiling():
            if _computed_again():
                return
            if 0 <= self._outermost < depth:
                return
            self.collect()
            # Forget what the classifier was given when a checkpointed backward pass computed it once more.
            self._latest = None
        elif 0 <= self._outermost < depth:
            return
        self._outermost = depth
        self._given = (inputs, named)
        self._runs = 0

    def _keep(self, depth: int, module: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
        # These lines call no other method of this class: torch.compile traces them into the model's graph.
        if torch.jit.is_tracing() or _is_replica(module):  # type: ignore[attr-defined, no-untyped-call]
            return
        if torch.is_grad_enabled() and module.training and inputs and isinstance(inputs[0], Tensor):
            self._latest = (inputs[0].detach(), output.detach() if isinstance(output, Tensor) else None)
            self._runs += 1

    def _returned(self, depth: int, module: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
        if torch.compiler.is_compiling() or _is_replica(module):
            return
        if depth == self._outermost and not _computed_again():
            # Stays False if only the evaluation calls the model, and the training calls parts of it.
            self._model_returns |= self._latest is not None
            self._hand_on()

    def collect(self) -> None:
        """Hand on a forward pass whose end no hook saw: the model was compiled after attaching, or is run in parts."""
        if not self._model_returns:
            self._hand_on()

    def _hand_on(self) -> None:
        if self._latest is not None:
            self._boundary.call(self._forward_seen, self._latest[0])
        self._latest = self._given = None
        self._outermost = -1
        self._runs = 0

    def _forward_seen(self, inputs: Tensor) -> None:
        # While a CUDA graph is recorded, its forward pass computes nothing yet, and may not pin memory or wait.
        recorded = inputs.device.type == "cuda" and torch.cuda.is_current_stream_capturing()
        if inputs.dim() >= 2 and len(inputs) and not recorded:
            self.seen += 1
            self.device = inputs.device
            # If the training called only parts of the model, nothing but the classifier's input is known.
            given = tensors_in(self._given) or [inputs]
            self._forward(Shown(given, tuple(inputs.shape), self._runs))

    def see(self, rows: npt.NDArray[np.int64], labels: npt.NDArray[np.int32] | None) -> Seen:
        """Compute the embeddings and losses of these rows of the latest forward pass, as copies to the host."""
        assert self._latest is not None
        inputs, output = self._latest
        count = len(inputs)
        if len(rows) < count:
            chosen = to_device(torch.from_numpy(rows), inputs.device)
            inputs = inputs[chosen]
            output = output[chosen] if output is not None and output.dim() and len(output) == count else None
        return self.shown(inputs, output, labels)

    def shown(self, inputs: Tensor, output: Tensor | None, labels: npt.NDArray[np.int32] | None) -> Seen:
        """The embeddings and losses for a classifier's input and output."""
        with torch.no_grad(), torch.autocast(inputs.device.type, enabled=False):
            embeddings = self._embeddings(inputs)
            losses = None if output is None or labels is None else _cross_entropy(output, labels)
            return Seen(to_host(embeddings), None if losses is None else to_host(losses))

    def _embeddings(self, inputs: Tensor) -> Tensor:
        if inputs.dim() == 4:  # channels first: an average over the image
            inputs = inputs.mean((2, 3))
        elif inputs.dim() > 2:  # tokens: an average over them
            inputs = inputs.flatten(1, -2).mean(1)
        embeddings = inputs.float() if self._raw else nn.functional.normalize(inputs.float(), dim=1)
        width = embeddings.shape[1]
        if width > self._dimension:
            key = (width, embeddings.device)
            if key not in self._projections:
                self._projections[key] = projection(width, self._dimension).to(embeddings.device)
            embeddings = embeddings @ self._projections[key]
        return embeddings.half()


class _Callback:
    """A torch hook that calls a method of Capture with the depth of its module (0 is the model)."""

    def __init__(self, method: Callable[..., None], depth: int) -> None:
        self._method = method
        self._depth = depth

    def __call__(self, *given: Any) -> None:
        self._method(self._depth, *given)

    def __reduce__(self) -> Any:
        # A copy of the model (for averaged weights, in a checkpoint) has its hooks too. In the copy this hook becomes a
        # function that does nothing and needs nothing of this package.
        return getattr, (contextlib.nullcontext(), "__exit__")

    @property
    def __name__(self) -> str:
        # Only torch.jit.script asks for the name, in order to compile the hook.
        raise RuntimeError(
            "torch.jit.script cannot compile a model with a hook: call hook.close() before, and attach afterwards"
        )


def _have_compiled_code_see_hooks() -> None:
    """Have torch.compile compile a model again if its hooks are not those that its code was compiled with.

    By default torch.compile does not look: code of a model without hooks would serve each model of the same class, and
    code of this model other ones. Code from before this call does not look either, so it is discarded. To look takes
    0.3 ms in each forward pass of 300 modules.
    """
    config: Any = importlib.import_module("torch._dynamo.config")
    if config.skip_nnmodule_hook_guards:
        config.skip_nnmodule_hook_guards = False
        torch.compiler.reset()


def modules_around(model: nn.Module, classifier: nn.Module) -> list[nn.Module]:
    """The model and its modules that contain the classifier, from the outermost to the innermost."""
    for name, module in model.named_modules():
        if module is classifier and name:
            parts = name.split(".")[:-1]
            return [model.get_submodule(".".join(parts[:depth])) for depth in range(len(parts) + 1)]
    return [model]


def _is_replica(module: nn.Module) -> bool:
    """Whether this is a copy by nn.DataParallel: such copies have the hooks, and run in several threads at once."""
    return bool(getattr(module, "_is_replica", False))


def _computed_again() -> bool:
    """Whether a backward pass is running: checkpointing computes a part of the forward pass there once more."""
    return bool(torch._C._current_graph_task_id() != -1)


def _cross_entropy(output: Tensor, labels: npt.NDArray[np.int32]) -> Tensor | None:
    """Each row's cross-entropy against its declared label; None unless the output has one number for each class."""
    if output.dim() != 2 or output.shape[0] != len(labels) or labels.min() < 0 or labels.max() >= output.shape[1]:
        return None
    target = to_device(torch.from_numpy(labels.astype(np.int64)), output.device)
    return as_float16(nn.functional.cross_entropy(output.float(), target, reduction="none"))


def as_float16(losses: Tensor) -> Tensor:
    """The losses in half precision; a loss that is too large for it becomes its largest number."""
    return losses.clamp(max=_FLOAT16_MAX).half()


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """A copy of a host's tensor on the device; the copy may not be complete yet."""
    if device.type == "cuda":
        # A copy from memory that is not pinned may wait for all the work that the device still has to do.
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)


def to_host(tensor: Tensor) -> HostCopy:
    """A copy of a tensor on the host; the device makes it after the work that it was given before."""
    if tensor.device.type != "cuda":
        return tensor.cpu().numpy
    copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor, non_blocking=True)
    # A thread that waits for a blocking event sleeps, and leaves the core to the data loader.
    event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
    event.record(torch.cuda.current_stream(tensor.device))

    def array() -> npt.NDArray[Any]:
        event.synchronize()
        return copy.numpy()

    return array


class Evaluation:
    """Reads samples as the loader does, in this process, and computes their losses.

    `labels` are those of the list, or None if there are none; each batch is passed to `record`.
    """

    def __init__(
        self,
        model: nn.Module,
        classifier: nn.Module,
        loader: DataLoader[Any],
        labels: npt.NDArray[np.int32] | None,
        capture: Capture,
        record: Callable[[npt.NDArray[np.uint32], Seen], None],
    ) -> None:
        # DistributedDataParallel would make ranks wait for each other, but each evaluates its own number of batches.
        self._model: nn.Module = model.module if isinstance(model, nn.parallel.DistributedDataParallel) else model
        self._classifier = classifier
        self._dataset: Any = loader.dataset
        self._collate: Callable[[list[Any]], Any] = loader.collate_fn
        self._labels, self._capture, self._record = labels, capture, record
        self._usable = True

    def losses(self, indices: npt.NDArray[np.int64]) -> npt.NDArray[np.float32] | None:
        """The loss of each sample; None if this model and data set cannot give them, which is logged once.

        The data set must give an input, or a tuple that begins with the input, as for the training; and the classifier
        must give one number for each class.
        """
        if not self._usable:
            return None
        try:
            with _as_it_was(self._model), torch.no_grad():
                parts = [self._part(indices[first : first + _BATCH]) for first in range(0, len(indices), _BATCH)]
        except Exception as exc:
            if by_signal_handler(exc):
                raise
            # An error here must not stop the training, which goes on with the losses that it knows.
            log.exception("samples cannot be evaluated between epochs")
            self._usable = False
            return None
        return np.concatenate(parts)

    def _part(self, indices: npt.NDArray[np.int64]) -> npt.NDArray[np.float32]:
        collated = self._collate([self._dataset[index] for index in indices.tolist()])
        inputs = collated[0] if isinstance(collated, tuple | list) else collated
        if not isinstance(inputs, Tensor):
            raise TypeError(f"the data set's samples begin with {type(inputs).__name__}, not with a tensor")
        shown: list[tuple[Tensor, Tensor | None]] = []

        def keep(module: nn.Module, given: tuple[Any, ...], output: Any) -> None:
            shown.append((given[0], output if isinstance(output, Tensor) else None))

        handle = self._classifier.register_forward_hook(keep)
        try:
            self._model(inputs.to(next(self._model.parameters()).device))
        finally:
            handle.remove()
        seen = self._capture.shown(*shown[0], None if self._labels is None else self._labels[indices])
        if seen.losses is None:
            raise TypeError("the classifier does not give one number for each class")
        self._record(indices.astype(np.uint32), seen)
        return seen.losses().astype(np.float32)


@contextmanager
def _as_it_was(model: nn.Module) -> Iterator[None]:
    """Put every module into evaluation mode, and afterwards back into the mode that it had."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training
