"""What generate() may ask of a model with streaming states, and what it may not."""

from __future__ import annotations

from typing import Any, NoReturn

from transformers import GenerationMixin

from femixer.models.cache import FEMCache


class FEMGeneration(GenerationMixin):
    """GenerationMixin with an FEMCache, made before the prompt is read so that it can be read in chunks."""

    config: Any

    @classmethod
    def _supports_default_dynamic_cache(cls) -> bool:
        return False  # generate() would hand in keys and values

    def _prepare_cache_for_generation(  # type: ignore[override]
        self, generation_config: Any, model_kwargs: dict[str, Any], *args: Any
    ) -> None:
        asked = generation_config.cache_implementation
        if asked not in (None, "dynamic"):
            raise ValueError(
                f"cache_implementation={asked!r} is not allowed; choose None: states of mixers are no keys and values, "
                "which alone can be kept in place, on another device or quantized"
            )
        super()._prepare_cache_for_generation(generation_config, model_kwargs, *args)  # type: ignore[misc]
        if generation_config.use_cache is not False and model_kwargs.get("past_key_values") is None:
            model_kwargs["past_key_values"] = FEMCache(self.config.num_hidden_layers)

    def prepare_inputs_for_generation(self, *args: Any, tokenizer: Any = None, **kwargs: Any) -> Any:
        """tokenizer: generate() reads it for its stop strings, and hands it on."""
        return super().prepare_inputs_for_generation(*args, **kwargs)  # type: ignore[misc]

    def init_continuous_batching(self, *_: Any, **__: Any) -> NoReturn:
        raise _no_continuous_batching()

    def continuous_batching_context_manager(self, *_: Any, **__: Any) -> NoReturn:
        raise _no_continuous_batching()

    def generate_batch(self, *_: Any, **__: Any) -> NoReturn:
        raise _no_continuous_batching()


def _no_continuous_batching() -> RuntimeError:
    return RuntimeError(
        "continuous batching needs keys and values in pages, which these models do not have; "
        "use generate() with a left-padded batch and its attention_mask"
    )
