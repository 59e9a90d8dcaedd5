"""What our servers can do beyond vLLM's own worker. vLLM's Python imports this file, which has nothing of lagrpo."""


class Worker:
    """Mixed into vLLM's worker by --worker-extension-cls; its methods are called by collective_rpc."""

    def reload_with_head(self, weights_path: str) -> None:
        """Load a directory of weights, into the head, too: on a CPU vLLM 0.32 keeps a packed copy of the head, and does
        not renew it where the head shares its weights with the embedding."""
        self.reload_weights(weights_path=weights_path)  # type: ignore[attr-defined]
        head = getattr(self.get_model(), "lm_head", None)  # type: ignore[attr-defined]
        if head is not None and hasattr(head, "cpu_linear"):
            head.quant_method.process_weights_after_loading(head)
