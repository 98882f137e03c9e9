# SPDX-License-Identifier: Apache-2.0
"""Dynamic sparse attention methods: one small class each, its keyword arguments are its config schema."""
