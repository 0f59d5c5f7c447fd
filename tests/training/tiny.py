"""The tiny model that the tests of training share."""

import torch

from training.model import Model
from training.shape import Shape

TINY = Shape(
    vocab=64,
    hidden=32,
    layers=3,
    dense_size=64,
    heads=2,
    nope_dim=8,
    rope_dim=8,
    value_dim=8,
    latent_dim=16,
    experts=8,
    top_k=2,
    expert_size=16,
    shared_size=16,
    groups=4,
    top_groups=2,
    context=64,
)


def make_model(shape: Shape = TINY) -> Model:
    """Random weights, and a routing bias that matters."""
    torch.manual_seed(0)
    model = Model(shape).eval()
    for layer in model.experts():
        layer.bias.uniform_(-0.2, 0.2)
    return model
