"""The scenarios and comparisons of `gpu/run_several.sh`, on CPU devices in place of GPUs."""

import dataclasses

import pytest
from gpu import several
from gpu.several import Way


@pytest.mark.parametrize(
    "way",
    [
        Way(1, 4),
        Way(2, 2, groups=2, shuffled=True),
        *(
            pytest.param(way, marks=pytest.mark.long)
            for way in (
                Way(2, 1),
                Way(1, 2),
                Way(4, 1, shuffled=True),
                Way(1, 8),
                Way(8, 1),
                Way(4, 2, groups=2),
                Way(2, 4, groups=4, shuffled=True),
            )
        ),
    ],
    ids=str,
)
def test_ranks_spread_over_processes_have_the_same_bits(way):
    assert several.run(dataclasses.replace(way, platform="cpu"))


def test_other_bits_are_an_error_that_names_both_ways(monkeypatch, tmp_path):
    file, way = tmp_path / "digests", Way(1, 2, platform="cpu")
    monkeypatch.setenv(several.DIGESTS_VARIABLE, str(file))
    monkeypatch.setattr(several, "_known", {})
    assert several.run(way, "values") == several.run(way, "values")
    first, *others = file.read_text().splitlines()
    platform, what, _, by = first.split(maxsplit=3)
    assert by == "1 x 2"
    file.write_text("\n".join([f"{platform} {what} {'0' * 64} 2 x 1 on one GPU", *others]))
    monkeypatch.setattr(several, "_known", {})
    with pytest.raises(AssertionError, match=f"{what}: .* 1 x 2 are not those of 2 x 1 on one GPU"):
        several.run(way, "values")
