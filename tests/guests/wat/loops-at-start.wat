;; Loops while it is instantiated.
(module
  ;;! include reward
  (func $odd (param i32))
  (start $loop)
  (func $loop
    (loop $again
      (br $again)))
)
