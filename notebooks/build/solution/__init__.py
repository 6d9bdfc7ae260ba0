"""The reference solution of "Build it yourself": the files that the pages write.
Students do not get it.
"""
