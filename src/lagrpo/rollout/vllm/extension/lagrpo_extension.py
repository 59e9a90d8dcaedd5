"""What our servers can do beyond vLLM's own worker. vLLM's Python imports this file, which has nothing of lagrpo."""

from typing import Any

import torch

COLUMNS = 64  # of the head that are compared


class Worker:
    """Mixed into vLLM's worker by --worker-extension-cls; its methods are called by collective_rpc."""

    def reload_with_head(self, weights_path: str) -> None:
        """Load a directory of weights, into the head, too: on a CPU vLLM 0.32 keeps a packed copy of the head, and does
        not renew it where the head shares its weights with the embedding. Raises RuntimeError where it still does not
        multiply by the weights."""
        self.reload_weights(weights_path=weights_path)  # type: ignore[attr-defined]
        head = getattr(self.get_model(), "lm_head", None)  # type: ignore[attr-defined]
        if head is not None and hasattr(head, "cpu_linear"):
            head.quant_method.process_weights_after_loading(head)
            check_head(head)


@torch.inference_mode()
def check_head(head: Any) -> None:
    """Raise RuntimeError unless the products of the head are those of its weights [out, in]: a product with a unit
    vector is a column, to the bit, in every arithmetic."""
    weight = head.weight
    chosen = torch.linspace(0, weight.shape[1] - 1, COLUMNS).long()
    units = torch.zeros(COLUMNS, weight.shape[1], dtype=weight.dtype)
    units[torch.arange(COLUMNS), chosen] = 1
    if not torch.equal(head.cpu_linear(units, weight, None), weight[:, chosen].mT):
        raise RuntimeError("the packed copy of lm_head was not renewed: the server would go on with an older head")
