# SPDX-License-Identifier: Apache-2.0
"""The four stages of a job: each a function run(job, folder) that leaves records, and their manifest last."""
