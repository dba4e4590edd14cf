"""Workers in Ray actors, on any node of a cluster; rows come back through its object store."""
