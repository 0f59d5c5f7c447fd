"""Muon for the matrices, AdamW for embedding, router and norms.

Muon: K. Jordan et al. 2024, https://kellerjordan.github.io/posts/muon; its update is the momentum made orthogonal.
"""

from collections.abc import Callable, Iterable
from typing import overload

import torch
from torch import Tensor, nn

MUON_RATE = 0.02
ADAM_RATE = 3e-3
_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
_STEPS = 5


def orthogonalise(matrices: Tensor) -> Tensor:
    """Newton-Schulz iteration: [N, R, C] -> bfloat16 [N, R, C] with singular values near one."""
    a, b, c = _COEFFICIENTS
    x = matrices.bfloat16()
    tall = x.shape[-2] > x.shape[-1]
    x = x.mT if tall else x
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(_STEPS):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    result: Tensor = x.mT if tall else x
    return result


class Muon(torch.optim.Optimizer):
    """Nesterov momentum, orthogonalised per matrix; 3-D parameters are stacks of matrices (the experts).

    Parameters of one shape are updated together: some ten launches in place of a thousand.
    """

    def __init__(
        self, params: Iterable[Tensor], lr: float, *, momentum: float = 0.95, weight_decay: float = 0.05
    ) -> None:
        """params: matrices or stacks of matrices."""
        defaults = {"lr": lr, "momentum": momentum, "weight_decay": weight_decay}
        super().__init__(params, defaults)

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Update by the gradients; parameters without one stay."""
        assert closure is None, "not supported"
        for settings in self.param_groups:
            by_shape: dict[torch.Size, list[Tensor]] = {}
            for parameter in settings["params"]:
                if parameter.grad is not None:
                    by_shape.setdefault(parameter.shape, []).append(parameter)
            for parameters in by_shape.values():
                self._update(parameters, settings["lr"], settings["momentum"], settings["weight_decay"])
        return None

    def _update(self, parameters: list[Tensor], lr: float, momentum: float, weight_decay: float) -> None:
        gradients = torch.stack([p.grad for p in parameters if p.grad is not None])
        state = self.state[parameters[0]]  # of all parameters of this shape
        if not state:
            state["momentum"] = torch.zeros_like(gradients)
        average: Tensor = state["momentum"]
        average.lerp_(gradients, 1 - momentum)
        rows, columns = gradients.shape[-2:]
        update = orthogonalise(gradients.lerp(average, momentum).view(-1, rows, columns)).view_as(gradients)
        rate = lr * max(1.0, rows / columns) ** 0.5
        for parameter, change in zip(parameters, update, strict=True):
            parameter.mul_(1 - lr * weight_decay).add_(change, alpha=-rate)


def make_optimizers(model: nn.Module) -> list[torch.optim.Optimizer]:
    """One optimizer per kind of parameter; each group remembers its full rate as `base`."""
    matrices: list[Tensor] = []
    others: list[Tensor] = []
    for name, parameter in model.named_parameters():
        matrix = parameter.dim() >= 2 and not name.endswith(("embedding.weight", ".gate"))
        (matrices if matrix else others).append(parameter)
    fused = others[0].is_cuda
    optimizers: list[torch.optim.Optimizer] = [
        Muon(matrices, MUON_RATE),
        torch.optim.AdamW(others, ADAM_RATE, betas=(0.9, 0.95), weight_decay=0.0, fused=fused),
    ]
    for optimizer in optimizers:
        for settings in optimizer.param_groups:
            settings["base"] = settings["lr"]
    return optimizers


def scale_rates(optimizers: Iterable[torch.optim.Optimizer], scale: float) -> None:
    """Set every learning rate to `scale` times its full one."""
    for optimizer in optimizers:
        for settings in optimizer.param_groups:
            settings["lr"] = settings["base"] * scale
