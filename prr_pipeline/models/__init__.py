# SPDX-License-Identifier: Apache-2.0
"""Language models: where weights come from, tokenizers, the attention hook and the KV cache."""
