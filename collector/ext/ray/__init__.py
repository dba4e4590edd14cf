"""Workers in Ray actors on any node of a cluster. Ray's object store transfers the rows."""
