"""The science of SCONE: counting, matching, the forest, the joint model, the table. Imports no
infrastructure.
"""
