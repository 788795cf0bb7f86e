"""What a training forward shows of its samples: the classifier's input, and the loss of each.

Inside the model a hook on the classifier layer only keeps two references; torch.compile takes that into its graph
without a break, autocast and DistributedDataParallel do not see it. The work (projection, cross-entropy, the copy to
the host) is done when the model has returned, out of every graph and with gradients off.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

# The same on all machines and in all runs of a training, so that stored embeddings stay comparable.
_PROJECTION_SEED = 20_250_219
_FLOAT16_MAX = 65_504.0


def find_classifier(model: nn.Module, given: str | nn.Module | None) -> nn.Module:
    """The layer given by itself or by name, else the last Linear; raises ValueError if there is none."""
    if isinstance(given, nn.Module):
        return given
    names: dict[str, nn.Module] = dict(model.named_modules())
    if given is not None:
        # Wrappers put their own name in front: "module." (DDP), "_orig_mod." (torch.compile).
        for name, module in names.items():
            if name == given or name.replace("_orig_mod.", "").removeprefix("module.") == given:
                return module
        raise ValueError(f"the model has no layer {given!r}")
    linear = [module for module in names.values() if isinstance(module, nn.Linear)]
    if not linear:
        raise ValueError("the model has no Linear layer: name its classifier with classifier=...")
    return linear[-1]


class HostCopy(NamedTuple):
    """A tensor on its way to the host."""

    tensor: Tensor
    ready: Callable[[], None]

    def array(self) -> npt.NDArray[Any]:
        """May wait for the device, so not for the training's thread."""
        self.ready()
        array: npt.NDArray[Any] = self.tensor.numpy()
        return array


class Seen(NamedTuple):
    """What one forward showed of its rows."""

    embeddings: HostCopy
    losses: HostCopy | None


class Capture:
    """Calls `forward(rows)` after each training forward; that calls `see` if it knows the rows' samples."""

    def __init__(self, model: nn.Module, classifier: nn.Module, dimension: int, forward: Callable[[int], None]) -> None:
        self._dimension = dimension
        self._forward = forward
        self._latest: tuple[Tensor, Tensor | None] | None = None
        self._model_returns = False
        self._projections: dict[tuple[int, torch.device], Tensor] = {}
        self.seen = 0
        self.device = torch.device("cpu")
        """That of the latest forward's classifier."""
        # In this order: where the classifier is the whole model, it is kept before it is handed on.
        self._handles = [
            model.register_forward_pre_hook(self._clear),
            classifier.register_forward_hook(self._keep),
            model.register_forward_hook(self._returned),
        ]

    def __reduce__(self) -> tuple[type[Capture], tuple[()]]:
        # A copy of the model (an average of its weights, a checkpoint) takes its hooks along: they do nothing there.
        return _Inert, ()

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()

    def _keep(self, module: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
        # No method of ours in here: torch.compile traces these lines into the model's graph.
        if torch.is_grad_enabled() and module.training and inputs:
            self._latest = (inputs[0].detach(), output.detach() if isinstance(output, Tensor) else None)

    def _clear(self, module: nn.Module, inputs: tuple[Any, ...]) -> None:
        if not torch.compiler.is_compiling():
            self.collect()
            # What a checkpointed backward pass computed again since the last forward.
            self._latest = None

    def _returned(self, module: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
        if not torch.compiler.is_compiling():
            # Not if only its evaluation goes through the model, and its training step through parts of it.
            self._model_returns |= self._latest is not None
            self._hand_on()

    def collect(self) -> None:
        """Take up a forward whose end was not seen: of a model compiled after the hooks were set, or run in parts."""
        if not self._model_returns:
            self._hand_on()

    def _hand_on(self) -> None:
        if self._latest is not None and self._latest[0].dim() >= 2 and not _only_recorded(self._latest[0]):
            self.seen += 1
            self.device = self._latest[0].device
            self._forward(len(self._latest[0]))
        self._latest = None

    def see(self, labels: npt.NDArray[np.int32]) -> Seen:
        """Project what the latest forward showed, and start its copy to the host."""
        assert self._latest is not None
        return self.shown(*self._latest, labels)

    def shown(self, inputs: Tensor, output: Tensor | None, labels: npt.NDArray[np.int32]) -> Seen:
        """The same for what a classifier was given, and what it made of it."""
        with torch.no_grad(), torch.autocast(inputs.device.type, enabled=False):
            embeddings = self._embeddings(inputs)
            losses = None if output is None else _cross_entropy(output, labels)
            return Seen(to_host(embeddings), None if losses is None else to_host(losses))

    def _embeddings(self, inputs: Tensor) -> Tensor:
        if inputs.dim() == 4:  # channels first: an average over the image
            inputs = inputs.mean((2, 3))
        elif inputs.dim() > 2:  # tokens: an average over them
            inputs = inputs.flatten(1, -2).mean(1)
        unit = nn.functional.normalize(inputs.float(), dim=1)
        width = unit.shape[1]
        if width > self._dimension:
            unit = unit @ self._projection(width, unit.device)
        return unit.half()

    def _projection(self, width: int, device: torch.device) -> Tensor:
        """A fixed Gaussian matrix that keeps lengths on the average (Johnson-Lindenstrauss)."""
        key = (width, device)
        if key not in self._projections:
            generator = torch.Generator().manual_seed(_PROJECTION_SEED + width)
            matrix = torch.randn(width, self._dimension, generator=generator) / self._dimension**0.5
            self._projections[key] = matrix.to(device)
        return self._projections[key]


class _Inert(Capture):
    def __init__(self) -> None:
        self._latest = None
        self._model_returns = False

    def _hand_on(self) -> None:
        self._latest = None


def _only_recorded(tensor: Tensor) -> bool:
    """Whether a CUDA graph is being captured: its forward computes nothing yet, and may not pin memory or wait."""
    return tensor.device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def _cross_entropy(output: Tensor, labels: npt.NDArray[np.int32]) -> Tensor | None:
    """Each row's cross-entropy against its declared label; None where the output is not one score a class."""
    if output.dim() != 2 or output.shape[0] != len(labels) or labels.min() < 0 or labels.max() >= output.shape[1]:
        return None
    target = to_device(torch.from_numpy(labels.astype(np.int64)), output.device)
    return as_float16(nn.functional.cross_entropy(output.float(), target, reduction="none"))


def as_float16(losses: Tensor) -> Tensor:
    """What is too large for the format becomes its largest number."""
    return losses.clamp(max=_FLOAT16_MAX).half()


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Start a copy of a tensor on the host."""
    if device.type == "cuda":
        # From other memory the driver may wait for all that the device still has to do.
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)


def to_host(tensor: Tensor) -> HostCopy:
    """Start a copy that the device does when it comes to it."""
    if tensor.device.type == "cpu":
        return HostCopy(tensor, lambda: None)
    if tensor.device.type != "cuda":
        return HostCopy(tensor.cpu(), lambda: None)
    copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor, non_blocking=True)
    # One that is waited for asleep: the core belongs to the data loader.
    event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
    event.record(torch.cuda.current_stream(tensor.device))
    return HostCopy(copy, event.synchronize)
