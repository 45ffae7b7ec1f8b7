"""One model with one provider's norms: its training step and forward pass, eager, as a CUDA graph, compiled."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from benchmarks.models.architectures import Inputs, ModelArchitecture

Call = Callable[[], Any]

_BEFORE_CAPTURE = 3


class StepOutcome(NamedTuple):
    """The result of a training step.

    Attributes:
        loss: of the batch.
        gradient_norm: over all parameters.
    """

    loss: float
    gradient_norm: float

    def compute_error(self, other: "StepOutcome") -> float:
        """The larger relative difference from a reference; NaN if either is."""
        errors = torch.tensor([abs(a - b) / max(abs(b), 1e-12) for a, b in zip(self, other, strict=True)])
        return float(errors.max())


class ModelPasses:
    """The passes of one model over one batch.

    Args:
        model: on the device of the inputs.
    """

    def __init__(self, model: nn.Module, architecture: ModelArchitecture, inputs: Inputs) -> None:
        self._model, self._loss = model, architecture.loss
        self._inputs = inputs
        self._all_inputs = inputs | architecture.step_inputs(inputs)
        self._called: Callable[..., Any] = model

    def compile(self) -> None:
        """Call the model through torch.compile from now on, for these shapes only."""
        self._called = torch.compile(self._model, dynamic=False)

    def get_call(self, pass_: str) -> Call:
        """The timed function: `step` or `forward`."""
        return self._train_step if pass_ == "step" else self._run_forward

    def clear_gradients(self) -> None:
        """Drop all gradients."""
        self._model.zero_grad(set_to_none=True)

    def run_step(self) -> StepOutcome:
        """The outcome of one training step."""
        loss = float(self._train_step())
        outcome = StepOutcome(loss, self._compute_gradient_norm())
        self.clear_gradients()
        return outcome

    def capture_graph(self, pass_: str) -> "PassGraph":
        """The pass as a CUDA graph."""
        return PassGraph(self.get_call(pass_), self.clear_gradients)

    def replay_step(self, graph: "PassGraph") -> StepOutcome:
        """The outcome of one replay of the training step's graph."""
        loss = float(graph.replay())
        return StepOutcome(loss, self._compute_gradient_norm())

    def _train_step(self) -> Tensor:
        self.clear_gradients()
        loss = self._loss(self._called(**self._all_inputs))
        loss.backward()
        return loss.detach()

    def _run_forward(self) -> Any:
        with torch.no_grad():
            return self._called(**self._inputs)

    def _compute_gradient_norm(self) -> float:
        gradients = [parameter.grad for parameter in self._model.parameters() if parameter.grad is not None]
        return float(torch.stack([gradient.float().norm() for gradient in gradients]).norm())


class PassGraph:
    """A call captured as a CUDA graph, with all its allocations.

    Args:
        clear: frees the gradients of earlier calls, before the capture.
    """

    def __init__(self, call: Call, clear: Callable[[], None]) -> None:
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(_BEFORE_CAPTURE):
                call()
        torch.cuda.current_stream().wait_stream(side)
        clear()
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            self._result = call()

    def replay(self) -> Any:
        """Replay the graph; return its result, which is overwritten in place."""
        self._graph.replay()
        return self._result
