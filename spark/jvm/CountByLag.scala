package penstock

import java.nio.ByteBuffer

import org.apache.spark.sql.catalyst.InternalRow
import org.apache.spark.sql.catalyst.analysis.TypeCheckResult
import org.apache.spark.sql.catalyst.analysis.TypeCheckResult.{TypeCheckFailure, TypeCheckSuccess}
import org.apache.spark.sql.catalyst.expressions.Expression
import org.apache.spark.sql.catalyst.expressions.aggregate.{ImperativeAggregate, TypedImperativeAggregate}
import org.apache.spark.sql.catalyst.trees.UnaryLike
import org.apache.spark.sql.types.{DataType, LongType, StringType}
import org.apache.spark.unsafe.types.UTF8String

/** `penstock_lags(lag)`: the number of rows by logarithmic step of a lag in ms, as the text `step:rows step:rows …`.
  *
  * `spark/batch_report.py` has the other direction. Rows without a lag are not counted. Exact, whatever the lags: there are 17,500
  * steps between the shortest and the longest BIGINT.
  */
case class CountByLag(child: Expression, mutableAggBufferOffset: Int = 0, inputAggBufferOffset: Int = 0)
    extends TypedImperativeAggregate[LagCounts]
    with UnaryLike[Expression] {
  override def prettyName: String = "penstock_lags"
  override def dataType: DataType = StringType
  override def nullable: Boolean = false
  override def checkInputDataTypes(): TypeCheckResult =
    if (child.dataType == LongType) TypeCheckSuccess else TypeCheckFailure(s"$prettyName takes a BIGINT")

  override def createAggregationBuffer(): LagCounts = new LagCounts
  override def update(counts: LagCounts, row: InternalRow): LagCounts = {
    val lag = child.eval(row)
    if (lag != null) counts.count(lag.asInstanceOf[Long])
    counts
  }
  override def merge(counts: LagCounts, other: LagCounts): LagCounts = {
    other.foreach(counts.add)
    counts
  }
  override def eval(counts: LagCounts): Any = UTF8String.fromString(counts.toText)
  override def serialize(counts: LagCounts): Array[Byte] = counts.toBytes
  override def deserialize(bytes: Array[Byte]): LagCounts = LagCounts.fromBytes(bytes)

  override def withNewMutableAggBufferOffset(offset: Int): ImperativeAggregate = copy(mutableAggBufferOffset = offset)
  override def withNewInputAggBufferOffset(offset: Int): ImperativeAggregate = copy(inputAggBufferOffset = offset)
  override protected def withNewChildInternal(child: Expression): Expression = copy(child = child)
}

/** Rows by step. Negative lags, of clocks that are ahead, have negative steps. */
class LagCounts {
  private var late = new Array[Long](LagCounts.Small)
  private var early = Array.empty[Long]

  def count(lag: Long): Unit = add(LagCounts.stepOf(lag), 1)

  def add(step: Int, rows: Long): Unit =
    if (step >= 0) {
      late = LagCounts.atLeast(late, step)
      late(step) += rows
    } else {
      early = LagCounts.atLeast(early, -step)
      early(-step) += rows
    }

  def foreach(use: (Int, Long) => Unit): Unit = {
    for (step <- early.indices.reverse if early(step) > 0) use(-step, early(step))
    for (step <- late.indices if late(step) > 0) use(step, late(step))
  }

  def toText: String = {
    val text = new StringBuilder
    foreach((step, rows) => text.append(if (text.isEmpty) "" else " ").append(step).append(':').append(rows))
    text.toString
  }

  def toBytes: Array[Byte] = {
    var filled = 0
    foreach((_, _) => filled += 1)
    val buffer = ByteBuffer.allocate(filled * 12)
    foreach((step, rows) => buffer.putInt(step).putLong(rows))
    buffer.array
  }
}

object LagCounts {

  /** As in `spark/batch_report.py`. */
  private val Steps = 200
  private val Small = 1024

  def stepOf(lag: Long): Int = {
    val step = Math.round(Math.log1p(Math.abs(lag.toDouble)) * Steps).toInt
    if (lag < 0) -step else step
  }

  def fromBytes(bytes: Array[Byte]): LagCounts = {
    val counts = new LagCounts
    val buffer = ByteBuffer.wrap(bytes)
    while (buffer.hasRemaining) counts.add(buffer.getInt(), buffer.getLong())
    counts
  }

  private def atLeast(rows: Array[Long], step: Int): Array[Long] =
    if (step < rows.length) rows else java.util.Arrays.copyOf(rows, Math.max(step + 1, rows.length * 2))
}
