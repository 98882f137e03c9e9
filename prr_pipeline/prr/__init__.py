# SPDX-License-Identifier: Apache-2.0
"""The method: predictor, calibration, speculation budget, and the decode step with its modes."""
