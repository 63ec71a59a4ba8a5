"""One function per panel of the report, by subject: from a `View` to blocks, none where it has nothing to say.

`report/write.py` imports them and puts them in order.
"""
