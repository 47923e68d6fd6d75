import pytest
from world import World, nothing_left, row, spec


@pytest.mark.parametrize("shape", [[2], [1, 1], [4], [1, 1, 1, 1], [2, 2], [3, 1]])
def test_smoke(shape, sockets):
    world = World(shape)
    with nothing_left(world, sockets):
        made = world.establish(row(sum(shape)), spec(sum(shape)))
        print(made)
        print([m.summary for m in made])
        world.close(made)
    print(world.holdings())
