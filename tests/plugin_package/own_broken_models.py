raise RuntimeError("this plug-in was made for another motet")
