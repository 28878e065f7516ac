"""Front ends of the engine: plain torch and Megatron."""
