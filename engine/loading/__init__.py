"""From checkpoint files to resident, verified tensors: readers, receipts, the loader command."""
