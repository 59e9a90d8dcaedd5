"""An extension of vLLM's worker.

vLLM's Python imports this file, which imports nothing of lagrpo.
"""


class Worker:
    """A class that --worker-extension-cls mixes into vLLM's worker.

    collective_rpc calls its methods.
    """

    def get_nccl_version(self) -> str:
        """Returns the version of the NCCL that weights are received with, such as 2.27.3."""
        from vllm.distributed.device_communicators.pynccl_wrapper import (  # type: ignore[import-not-found]
            NCCLLibrary,
        )

        return NCCLLibrary().ncclGetVersion()

    def reload_with_head(self, weights_path: str) -> None:
        """Loads a directory of weights.

        On a CPU vLLM 0.32 keeps a packed copy of the output head. It does not renew the copy if the
        head shares its weights with the embedding; this method does.
        """
        self.reload_weights(weights_path=weights_path)  # type: ignore[attr-defined]
        head = getattr(self.get_model(), "lm_head", None)  # type: ignore[attr-defined]
        if head is not None and hasattr(head, "cpu_linear"):
            head.quant_method.process_weights_after_loading(head)
