"""Items that are pictures or sound: where they are, how they come here, and who decodes them.

`items.py` says what an item is, `fetching.py` brings its bytes, and `reading.py` has it read in
processes beside the device, which are those of `reader_process.py`.
"""
