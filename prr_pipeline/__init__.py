# SPDX-License-Identifier: Apache-2.0
"""Predict-Reuse-Repair decoding for dynamic sparse attention: a config-driven experiment pipeline."""

__version__ = "0.1.0"
