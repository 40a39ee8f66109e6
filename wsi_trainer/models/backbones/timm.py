"""Any convolutional network of timm."""

from __future__ import annotations

from collections.abc import Sequence
from difflib import get_close_matches
from typing import Any

from torch import Tensor, nn

from wsi_trainer.errors import UserError
from wsi_trainer.models.backbones.base import describe, stages_of
from wsi_trainer.models.backbones.torchvision_names import torchvision_names


class TimmBackbone(nn.Module):
    """A network of timm without its pooling and classifier; in a config also `timm:NAME`.

    Its weights are random: a file of weights is given as `model.pretrained`, so that a run needs no network.
    """

    def __init__(self, name: str) -> None:
        """Build the network.

        Args:
            name: The model's name in timm, such as resnet18.
        """
        super().__init__()
        self.name = name
        self.network = timm_network(name, global_pool="")
        try:
            self.out_channels, self.stride = describe(self.network)
        except TypeError as error:
            raise UserError(
                f"timm:{name} returns no map of features, as convolutional networks do; choose another model"
            ) from error

    def forward(self, x: Tensor) -> Tensor:
        return self.network(x)

    def maps_at(self, x: Tensor, places: Sequence[int]) -> list[Tensor]:
        """The maps at these places of those that timm names as the network's features."""
        network: Any = self.network
        return list(network.forward_intermediates(x, indices=list(places), intermediates_only=True))

    def sizes(self) -> list[tuple[int, int]]:
        """Channels and stride of each of these maps."""
        network: Any = self.network
        if not hasattr(network, "forward_intermediates"):
            raise UserError(f"timm:{self.name} does not give its inner maps; choose another model as encoder")
        return [(features["num_chs"], features["reduction"]) for features in network.feature_info]

    def stages(self) -> list[nn.Module]:
        """The direct parts of the network that have parameters."""
        return stages_of(self.network)


def timm_network(name: str, **arguments: Any) -> nn.Module:
    """A network of timm by its name, with random weights and without its classifier."""
    timm = import_timm()
    if name not in timm.list_models() and not timm.is_model(name):
        near = get_close_matches(name, timm.list_models(), n=3)
        raise UserError(f"timm has no model {name!r}" + (f"; near are {', '.join(near)}" if near else ""))
    network: nn.Module = timm.create_model(name, pretrained=False, num_classes=0, **arguments)
    return network


def import_timm() -> Any:
    """The package, or an error that says what is missing and how to get it; torchvision is never needed."""
    try:
        with torchvision_names():
            import timm
            import timm.models
    except ModuleNotFoundError as error:
        if error.name == "timm":
            raise UserError("timm is not installed: pip install --no-deps timm") from error
        raise UserError(
            f"timm is installed, but it cannot be imported without {error.name}, which is missing: pip install "
            f"{error.name}, or choose one of this package's own backbones"
        ) from error
    return timm
