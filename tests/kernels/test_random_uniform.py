"""Counter-based random numbers: pure, uniform, independent."""

import torch

from headrace.kernels.random_uniform import FRACTION_BITS, Purpose, random_uniform


def draw(seeds: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    return random_uniform(seeds, positions, Purpose.SAMPLE).double() / (1 << FRACTION_BITS)


def test_a_draw_depends_on_seed_and_position_alone() -> None:
    """Batch-mates, order and repetition do not matter."""
    seeds = torch.tensor([5, 5, -7, 1 << 62])
    positions = torch.tensor([0, 1, 0, 12345])
    together = draw(seeds, positions)
    for row in range(4):
        assert draw(seeds[row : row + 1], positions[row : row + 1]) == together[row]
    assert len(set(together.tolist())) == 4


def test_known_values_stay_the_same_for_ever() -> None:
    """A change here would break the replay of recorded requests."""
    drawn = random_uniform(torch.tensor([0, 1, 42]), torch.tensor([0, 0, 100]), Purpose.SAMPLE)
    assert drawn.tolist() == [717374697293, 404828653684, 740576857025]


def test_draws_are_uniform_over_seeds_and_over_positions() -> None:
    """Chi-square over 64 bins, along each axis; 110 is the 0.9997 quantile at 63 degrees of freedom."""
    count = 64_000
    numbers = torch.arange(count)
    for drawn in (draw(numbers, torch.zeros_like(numbers)), draw(torch.zeros_like(numbers), numbers)):
        observed = torch.histc(drawn, 64, 0, 1)
        chi_square = ((observed - count / 64) ** 2 / (count / 64)).sum()
        assert chi_square < 110


def test_neighbouring_seeds_and_positions_are_uncorrelated() -> None:
    numbers = torch.arange(64_000)
    ahead = draw(numbers, torch.zeros_like(numbers))
    for other in (draw(numbers + 1, torch.zeros_like(numbers)), draw(numbers, torch.ones_like(numbers))):
        correlation = torch.corrcoef(torch.stack([ahead, other]))[0, 1]
        assert abs(correlation) < 4 / 64_000**0.5


def test_purposes_draw_independently() -> None:
    """Of one seed and position: speculation's draws decide about each other."""
    numbers = torch.arange(64_000)
    drawn = torch.stack(
        [random_uniform(numbers, torch.full_like(numbers, 7), purpose).double() for purpose in Purpose]
    )
    off_diagonal = torch.corrcoef(drawn) - torch.eye(len(drawn))
    assert float(off_diagonal.abs().max()) < 5 / 64_000**0.5
