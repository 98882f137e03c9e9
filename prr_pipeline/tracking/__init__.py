# SPDX-License-Identifier: Apache-2.0
"""What a job reports: W&B runs, local tables, plots, progress. No stage's work depends on them."""
